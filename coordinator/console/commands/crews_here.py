"""A machine of a run: one node; or, where devices are placed, a node in each crew that has some here.

A node of a crew is a process of its own, which sees its crew's devices alone. This one starts it, passes on
its lines and signals, and starts it in another crew when the master's machine has placed the devices anew.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.local import as_overrides
from coordinator.console.views.terminal import LiveView
from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal import logs
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.machine.gpus import count_devices, count_gpus
from coordinator.machine.run_command import STARTED_BY, node_command, run_command
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from coordinator.protocol.placement_records import Placement
from coordinator.protocol.records import move_away
from coordinator.protocol.snapshot import ranks_text
from coordinator.settings import loading
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.placement import CREWS, Crew, Crews, Place
from coordinator.start.log_path import check_log_path
from coordinator.start.request import StartRequest
from coordinator.start.start import check_master, refuse_rank, resume_given
from coordinator.start.wait_for_master import patience

log = logging.getLogger(__name__)

LOOK_S = 0.1
SAY_AGAIN_S = 30.0
MOVE_S = 10.0
"""How long a node may take to see for itself that the devices are placed anew, once another one has."""
MAX_RESTARTS = 3
"""How often a killed node is started again while the other crew's lives: a person would have to stop both."""


def run_machine(request: StartRequest, as_node: Callable[[StartRequest], int]) -> int:
    """Take part in a run with this machine to its end; returns the exit code.

    `as_node` takes part as the one node of this machine. SettingsError: nothing was written.
    """
    if request.rank == MASTER:
        check_log_path(request.root)
    while True:
        overrides = _place_devices(request) if request.rank == MASTER else request.overrides
        placement = placement_records.read_placement(request.root)
        if placement.place:
            code = _run_crews(request, overrides, placement)
        else:
            code = as_node(replace(request, placed_as=placement.to_json()))
        if code != Exit.MOVED:
            return code
        if request.rank == MASTER:
            log.error("rank 0 was taken over by a start that places the devices anew; this process ends")
            return Exit.SUPERSEDED


def _place_devices(request: StartRequest) -> Mapping[str, Any]:
    """Publish which devices generate and which train; returns all that this start goes by.

    Nodes of another placement are told to look again.
    """
    root, before = request.root, placement_records.read_placement(request.root)
    cluster = loading.build(resume_given(request)).cluster
    placement = Placement(cluster.num_nodes, cluster.place)
    if not placement.place and not before.place:
        return request.overrides
    checked = check_master(request)
    if placement.place:
        placement_records.check(root, placement, {MASTER: count_devices()})
        placement_records.publish_devices(root, MASTER, socket.gethostname(), count_devices())
    if placement != before:
        for crew in CREWS:  # first: killed in between, this is done again, and no node stays in an old crew
            move_away(RunDir(root, crew))
        placement_records.publish_placement(root, placement)
    return checked.overrides


def _run_crews(request: StartRequest, overrides: Mapping[str, Any], placement: Placement) -> int:
    """Start this machine's nodes, and follow them to their end."""
    logs.set_up(request.rank)
    refuse_rank(request.rank, placement.num_nodes, "the master's ")
    placement_records.publish_devices(request.root, request.rank, socket.gethostname(), count_devices())
    crews = _await_crews(request, overrides, placement)
    if isinstance(crews, Exit):
        return crews
    places: dict[Crew, Place] = {
        crew: place
        for crew, all_places in crews.items()
        for place in all_places
        if place.machine == request.rank
    }
    leading = placement_records.run_dirs(request.root, placement)[0].crew
    interrupts = Interrupts()
    shown = LiveView(request.root, sys.stderr)
    if request.rank == MASTER:
        shown.start()
    try:
        with Children() as children:

            def start(crew: Crew) -> Child:
                has_settings = crew == leading or bool(request.rank)
                argv = _command(request, overrides if has_settings else {}, crew, placement)
                env = {"PYTHONUNBUFFERED": "1", **_visible(places[crew])}
                return children.start(crew, argv, env=env, echo=shown.say_line)

            codes = _follow(start, list(places), interrupts)
    finally:
        shown.stop()
        interrupts.close()
    return _outcome(codes, is_interrupted=bool(interrupts.received))


def _outcome(codes: Sequence[int], is_interrupted: bool) -> int:
    """Return the exit code that those of a machine's nodes come to.

    Those of crews that are no more say nothing, unless a newer process has this machine's place.
    """
    ended = [code for code in codes if code != Exit.MOVED]
    if len(ended) < len(codes):
        if is_interrupted:
            ended.append(Exit.INTERRUPTED)
        elif Exit.SUPERSEDED not in ended:
            return Exit.MOVED
    failed = [code for code in ended if code]
    return next((code for code in failed if code > 0), Exit.LOST) if failed else Exit.DONE


def _await_crews(request: StartRequest, overrides: Mapping[str, Any], placement: Placement) -> Crews | Exit:
    """Wait until each machine has said which devices it has; returns an exit code if one does not come."""
    said_s, awaited, default_s = float("-inf"), "", ClusterSettings().rejoin_timeout_s
    timeout_s = loading.check_each(overrides).get("cluster.rejoin_timeout_s", default_s)
    for waited_s in patience(timeout_s):
        if placement_records.read_placement(request.root) != placement:
            return Exit.MOVED
        if (crews := placement_records.placed_crews(request.root, placement)) is not None:
            return crews
        known = placement_records.device_counts(request.root).keys()
        absent = sorted(set(range(placement.num_nodes)) - known)
        commands = "; ".join(node_command(request.root, rank) for rank in absent)
        awaited = f"{ranks_text(absent)} to say what devices they have"
        awaited += "" if STARTED_BY in os.environ else f"; on that machine: {commands}"
        if waited_s >= said_s + SAY_AGAIN_S:
            said_s = waited_s
            log.info("waiting for %s", awaited)
    log.error("waited %.0f s for %s. Then start this one again", timeout_s, awaited)
    return Exit.LOST


def _command(
    request: StartRequest, overrides: Mapping[str, Any], crew: Crew, placement: Placement
) -> list[str]:
    """Return the command that starts this machine's node of a crew."""
    role = ["--worker", str(request.rank)] if request.rank else ["--master"]
    role += ["--reset-settings=all"] if overrides and not request.rank else []
    role += ["--accept-code-change"] if request.accept_code_change and overrides and not request.rank else []
    role += ["--allow-shared-dir"] if request.allow_shared_dir else []
    options = ["--log-path", str(request.root), "--crew", crew, "--placed-as", placement.to_json()]
    return run_command(*options, *role, *as_overrides(overrides))


def _visible(place: Place) -> dict[str, str]:
    """Return variables by which a node sees its crew's devices alone; none on a machine without GPUs."""
    count = count_gpus()
    if not count:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(number) for number in range(count)] if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[device].strip() for device in place.devices)}


def _follow(start: Callable[[Crew], Child], crews: Sequence[Crew], interrupts: Interrupts) -> list[int]:
    """Pass on signals until the nodes of all crews have ended; return their exit codes."""
    nodes: dict[Crew, Child] = {crew: start(crew) for crew in crews}
    restarts, is_ending, moved_s = Counter[Crew](), False, float("inf")
    while any(node.poll() is None for node in nodes.values()) and not interrupts.end_waiting:
        if interrupts.has_new():
            _signal(nodes, interrupts.received[-1])
        for crew, node in list(nodes.items()):
            code = node.poll()
            running = [other for other in nodes.values() if other.poll() is None]
            if code == Exit.MOVED:
                moved_s = min(moved_s, time.monotonic())
            if not is_ending and (code == Exit.USAGE or time.monotonic() >= moved_s + MOVE_S):
                is_ending = True
                _signal(nodes, signal.SIGTERM)  # once: at a second one a node ends out of order
            if code is not None and code < 0 and running and not interrupts.received:
                restarts[crew] += 1
                if restarts[crew] <= MAX_RESTARTS:
                    text = "the %s node of this machine was killed (signal %d): starting it again, %d of %d"
                    log.error(text, crew, -code, restarts[crew], MAX_RESTARTS)
                    nodes[crew] = start(crew)
        time.sleep(LOOK_S)
    return [code if (code := node.poll()) is not None else Exit.LOST for node in nodes.values()]


def _signal(nodes: Mapping[Crew, Child], number: int) -> None:
    for node in nodes.values():
        if node.poll() is None:
            os.kill(node.pid, number)
