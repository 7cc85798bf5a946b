"""A machine of a run: one node; or, where devices are placed, a node in each crew that has some here.

A node of a crew is a process of its own, which sees its crew's devices alone. This one starts it, passes on
its lines and signals, and starts it in another crew when the master's machine has placed the devices anew.
"""

import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.local import as_overrides
from coordinator.console.views.terminal import LiveView
from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal import logs
from coordinator.machine.children import Child, Children
from coordinator.machine.gpus import count_gpus
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from coordinator.protocol.placement_records import Placement
from coordinator.protocol.records import move_away
from coordinator.protocol.snapshot import ranks_text
from coordinator.settings import loading
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.placement import CREWS, Crew, Crews, Place
from coordinator.start.start import check_log_path, check_master, refuse_rank, resume_given
from coordinator.start.wait_for_master import patience

log = logging.getLogger(__name__)

LOOK_S = 0.1
SAY_AGAIN_S = 30.0
MOVE_S = 10.0
"""How long a node may take to see for itself that the devices are placed anew, once another one has."""
MAX_RESTARTS = 3
"""How often a killed node is started again while the other crew's lives: a person would have to stop both."""


@dataclass(frozen=True)
class Typed:
    """What was typed at this machine."""

    root: Path
    rank: int
    overrides: Mapping[str, Any]
    reset: Sequence[str]
    accept_code_change: bool
    allow_shared_dir: bool


def run_machine(typed: Typed, as_node: Callable[[str], int]) -> int:
    """Take part in a run with this machine to its end; returns the exit code.

    `as_node` takes part as the one node of this machine, unless another placement holds than the one that it
    is given, as JSON. SettingsError: nothing was written.
    """
    if typed.rank == MASTER:
        check_log_path(typed.root)
    while True:
        overrides = _place_devices(typed) if typed.rank == MASTER else typed.overrides
        placement = placement_records.read_placement(typed.root)
        code = _run_crews(typed, overrides, placement) if placement.place else as_node(placement.to_json())
        if code != Exit.MOVED:
            return code
        if typed.rank == MASTER:
            log.error("rank 0 was taken over by a start that places the devices anew; this process ends")
            return Exit.SUPERSEDED


def _place_devices(typed: Typed) -> Mapping[str, Any]:
    """Publish which devices generate and which train; returns all that this start goes by.

    Nodes of another placement are told to look again.
    """
    root, before = typed.root, placement_records.read_placement(typed.root)
    cluster = loading.build(resume_given(root, typed.overrides, typed.reset)).cluster
    placement = Placement(cluster.num_nodes, cluster.place)
    if not placement.place and not before.place:
        return typed.overrides
    checked = check_master(root, typed.overrides, typed.allow_shared_dir, typed.reset)
    if placement.place:
        placement_records.check(root, placement, {MASTER: _count_devices()})
        placement_records.publish_devices(root, MASTER, socket.gethostname(), _count_devices())
    if placement != before:
        for crew in CREWS:  # first: killed in between, this is done again, and no node stays in an old crew
            move_away(RunDir(root, crew))
        placement_records.publish_placement(root, placement)
    return checked.overrides


def _run_crews(typed: Typed, overrides: Mapping[str, Any], placement: Placement) -> int:
    """Start this machine's nodes, and follow them to their end."""
    logs.set_up(typed.rank)
    refuse_rank(typed.rank, placement.num_nodes, "the master's ")
    placement_records.publish_devices(typed.root, typed.rank, socket.gethostname(), _count_devices())
    crews = _await_crews(typed, overrides, placement)
    if isinstance(crews, Exit):
        return crews
    places: dict[Crew, Place] = {
        crew: place
        for crew, all_places in crews.items()
        for place in all_places
        if place.machine == typed.rank
    }
    leading = placement_records.run_dirs(typed.root, placement)[0].crew
    interrupts = Interrupts()
    shown = LiveView(typed.root, sys.stderr)
    if typed.rank == MASTER:
        shown.start()
    try:
        with Children() as children:

            def start(crew: Crew) -> Child:
                argv = _command(typed, overrides if crew == leading or typed.rank else {}, crew, placement)
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


def _await_crews(typed: Typed, overrides: Mapping[str, Any], placement: Placement) -> Crews | Exit:
    """Wait until each machine has said which devices it has; returns an exit code if one does not come."""
    said_s, who, default_s = float("-inf"), "", ClusterSettings().rejoin_timeout_s
    timeout_s = loading.check_each(overrides).get("cluster.rejoin_timeout_s", default_s)
    for waited_s in patience(timeout_s):
        if placement_records.read_placement(typed.root) != placement:
            return Exit.MOVED
        if (crews := placement_records.placed_crews(typed.root, placement)) is not None:
            return crews
        absent = sorted(set(range(placement.num_nodes)) - placement_records.device_counts(typed.root).keys())
        path = shlex.quote(str(typed.root))
        roles = [f"--worker {rank}" if rank else "--master" for rank in absent]
        commands = "; ".join(f"run {role} --log-path {path}" for role in roles)
        who = f"{ranks_text(absent)} to say what devices they have; on that machine: {commands}"
        if waited_s >= said_s + SAY_AGAIN_S:
            said_s = waited_s
            log.info("waiting for %s", who)
    log.error("waited %.0f s for %s. Then start this one again", timeout_s, who)
    return Exit.LOST


def _command(typed: Typed, overrides: Mapping[str, Any], crew: Crew, placement: Placement) -> list[str]:
    """Return what starts this machine's node of a crew."""
    role = ["--worker", str(typed.rank)] if typed.rank else ["--master"]
    role += ["--reset-settings=all"] if overrides and not typed.rank else []
    role += ["--accept-code-change"] if typed.accept_code_change and overrides and not typed.rank else []
    role += ["--allow-shared-dir"] if typed.allow_shared_dir else []
    options = ["--log-path", str(typed.root), "--crew", crew, "--placed-as", placement.to_json()]
    return [sys.executable, "-P", "-m", "coordinator.cli", *options, *role, *as_overrides(overrides)]


def _count_devices() -> int:
    """Return how many devices this machine has: its GPUs, or itself."""
    return max(1, count_gpus())


def _visible(place: Place) -> dict[str, str]:
    """Return what makes a node see the devices of its crew alone; nothing on a machine without GPUs."""
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
            others = [other for other in nodes.values() if other.poll() is None]
            if code == Exit.MOVED:
                moved_s = min(moved_s, time.monotonic())
            if not is_ending and (code == Exit.USAGE or time.monotonic() >= moved_s + MOVE_S):
                is_ending = True
                _signal(nodes, signal.SIGTERM)  # once: at a second one a node ends out of order
            if code is not None and code < 0 and others and not interrupts.received:
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
