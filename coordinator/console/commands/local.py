"""`run local`: start all nodes of a run as processes of this machine, in one terminal."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.console.commands.alone import alone
from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.views.run import Run
from coordinator.console.views.terminal import LiveView
from coordinator.directory import published
from coordinator.journal.control_characters import plain
from coordinator.journal.progress_reminder import progress_reminders
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.machine.gpus import count_devices
from coordinator.machine.run_command import STARTED_BY, run_command
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from coordinator.protocol.placement_records import Placement
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from coordinator.start.directory_access import refuse_strangers
from coordinator.start.inputs import load_inputs
from coordinator.start.log_path import check_log_path
from coordinator.start.refusals_of_models import fit_max_tokens
from coordinator.start.request import StartRequest
from coordinator.start.start import last_start, resume_given
from rollout.environment_variables import cores, omp_threads
from rollout.settings import DEMONSTRATION

LOOK_S = 0.25
GRACE_S = 15.0
"""How long nodes may take to end by themselves after a second interrupt."""


def run_local(children: Children, request: StartRequest) -> int:
    """Start all nodes, show them live, print the results; return the first exit code that is not 0.
    `children` is closed then.

    SettingsError if another `run local` has nodes in the directory: it would end when they are superseded.
    """
    look = f"stop it with Ctrl+C, or look: run status --log-path {shlex.quote(str(request.root))}"
    with alone("run local", "--log-path", request.root, look):
        return _run_local(children, request)


def _run_local(children: Children, request: StartRequest) -> int:
    root = request.root
    check_log_path(root)
    refuse_strangers(root, request.allow_shared_dir)  # what is kept there says which code is loaded here
    overrides = resume_given(request)
    settings = build(overrides)
    with progress_reminders(lambda: ("start", "run: reading the tasks and the model"), say=print):
        fit_max_tokens(settings, overrides, load_inputs(settings, overrides).context)
    nodes = settings.cluster.num_nodes
    placement = Placement(nodes, settings.cluster.place)
    _refuse_placement(root, placement, is_kept="cluster.place" not in request.overrides)
    threads = str(max(1, cores() // nodes))
    if omp_threads(os.environ):  # it may be a list, which OpenMP reads by itself
        threads = os.environ["OMP_NUM_THREADS"]
    again = f"run local --log-path {shlex.quote(str(root))}"
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", STARTED_BY: again}
    interrupts = Interrupts()
    arguments = ["--reset-settings=all", *as_overrides({**overrides, "cluster.num_nodes": nodes})]
    arguments += ["--accept-code-change"] if request.accept_code_change else []
    shared = ["--allow-shared-dir"] if request.allow_shared_dir else []
    started: list[Child] = []
    children.share_collectors(environment)
    with LiveView(root, sys.stdout) as shown:

        def echo(line: str) -> None:
            shown.say_line(plain(line))

        for rank in range(nodes):
            if rank == 1:
                _await_placement(root, placement, started[0], interrupts)
            role = ["--worker", str(rank)] if rank else ["--master", *arguments]
            argv = run_command("--log-path", str(root), *role, *shared)
            started.append(children.start(f"node-{rank}", argv, env=environment, echo=echo))
        codes = follow(started, interrupts)
        children.close()
    if codes[0] != Exit.USAGE:  # else nothing has been done
        _say_results(root)
    failed = [code for code in codes if code != 0]
    return next((code for code in failed if code > 0), Exit.LOST) if failed else Exit.DONE


def _refuse_placement(root: Path, placement: Placement, is_kept: bool) -> None:
    """Raise SettingsError for devices that the nodes, all of this machine, do not have. `is_kept`: the
    placement is that of the last start.
    """
    try:
        placement_records.check(root, placement, dict.fromkeys(range(placement.num_nodes), count_devices()))
    except SettingsError as error:
        hint = " (as at the last start; --reset-settings cluster.place places nothing)" if is_kept else ""
        raise SettingsError(f"{error}{hint}") from None


def _await_placement(root: Path, placement: Placement, master: Child, interrupts: Interrupts) -> None:
    """Wait until the master has placed the devices, has ended, or a signal has come, which is passed on then.
    An older placement may lack a worker.
    """
    if placement.place or placement_records.read_placement(root).place:
        while placement_records.read_placement(root) != placement:
            if master.poll() is not None or interrupts.received:
                return
            time.sleep(LOOK_S)


def follow(nodes: list[Child], interrupts: Interrupts) -> list[int]:
    """Pass on signals until all nodes have ended; return their exit codes. An interrupt is the master's to
    tell the others, while there is one.

    If the master refuses to start, was killed, or has ended without telling the others, they are ended: they
    would wait for one that starts.
    """
    told_s = failed_s = 0.0
    waiting = nodes[1:]
    while any(node.poll() is None for node in nodes) and told_s < GRACE_S:
        if interrupts.has_new():
            is_masters = not interrupts.end_all and nodes[0].poll() is None
            for node in nodes[:1] if is_masters else nodes:  # a master that has ended tells nobody
                if node.poll() is None:
                    os.kill(node.pid, signal.SIGINT if is_masters else signal.SIGTERM)
        code = nodes[0].poll()
        has_told_nobody = code is not None and (code in (Exit.FAILED, Exit.INTERRUPTED) or code < 0)
        failed_s += LOOK_S if has_told_nobody else 0.0
        if waiting and (nodes[0].poll() == Exit.USAGE or failed_s > GRACE_S):
            for node in waiting:
                if node.poll() is None:
                    os.kill(node.pid, signal.SIGTERM)
            waiting = []
        told_s += LOOK_S if interrupts.end_all else 0.0
        time.sleep(LOOK_S)
    return [code if (code := node.poll()) is not None else Exit.LOST for node in nodes]


def _say_results(root: Path) -> None:
    """Print the rewards, and where the checkpoint, the report and the run are."""
    try:
        run = Run(root)
    except SettingsError:  # it ended before the run began
        return
    lines, last = run.metrics(), last_start(root)
    is_scored = last is None or last.settings["rollout"]["environment"] != DEMONSTRATION
    for title, name in (("reward    ", "reward"), ("evaluation", "eval_reward")):
        known = [line for line in lines if line.get(name) is not None and (is_scored or name != "reward")]
        texts = [f"{line[name]:.3f} in iteration {line['iteration']}" for line in (*known[:1], *known[-1:])]
        if texts:
            print(title, ", ".join(dict.fromkeys(texts)))
    if newest := published.checkpoints(run.run_dir)[-1:]:
        path = run.checkpoint(newest[0], verify=False)  # it was verified when it was published
        print(f"checkpoint {path}")
    if lines:
        _say_report(root)
    print(f"run        {root}")


def _say_report(root: Path) -> None:
    try:
        from coordinator.console.report import write_report  # an interrupted run need not load it

        print(f"report     {write_report(root, None)}")
    except Exception as error:  # the run is done: a fault of the page must not make it look failed
        print(f"report     none: {error}")


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as the arguments of `run` that say the same."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]
