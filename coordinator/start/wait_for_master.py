"""Wait, as a starting node, for a living master."""

import logging
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import MASTER, RunDir
from coordinator.machine.run_command import STARTED_BY, node_command
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.placement_records import Placement, read_placement
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, parse
from coordinator.settings.tree import SettingsError
from coordinator.start.run_json import has_run, read_run_json, runs_near
from rollout.storage import files

log = logging.getLogger(__name__)

NOTHING_YET = " (nothing is there yet: the master makes it)"
FIRST_REMINDER_S, REMINDER_S = 10.0, 30.0
ENDS = {
    "stopped": "was stopped",
    "failed": "has failed",
    "gave_up": "was given up",
    "left": "has lost its master",
}
"""How the run of a master that has said so has ended, by the kind of its call."""
PLACED = "the master has placed the devices of the run"


def await_master(
    run_dir: RunDir, placement: Placement, timeout_s: float, node_timeout_s: float
) -> EpochRecord:
    """Return the newest record of a master whose beat moves: what a dead run has left does not count.

    Raises Ended: nobody came, or the run is finished, or its devices are placed otherwise than in
    `placement`, by which `run_dir` was found.
    """
    records, first, due_s = Records(run_dir), None, FIRST_REMINDER_S
    for waited_s in patience(timeout_s):
        board = _protocol(run_dir)
        if board is not None and read_placement(run_dir.root) != placement:
            raise NodeEnded(Exit.MOVED, PLACED)
        board = board or parse([])
        beat = board.beats.get(MASTER)
        if first is None and waited_s == 0.0:
            first = beat
        newest = records.newest(board.records)
        has_beaten = beat is not None and (first is None or beat[2:] > first[2:])
        is_its = newest and beat and newest.master_incarnation == beat.incarnation
        if newest and has_beaten and is_its and newest.kind != "moved":
            if STARTED_BY not in os.environ:
                log.info("found the master, on %s", newest.master_host)
            return newest
        if newest and newest.kind == "finished" and waited_s > node_timeout_s:
            again = f"run --master --log-path {shlex.quote(str(run_dir.root))} --iterations N"
            raise NodeEnded(Exit.DONE, f"the run at {run_dir.root} is finished; to go on with it: {again}")
        if waited_s == 0.0:
            is_over = newest is not None and newest.kind == "finished"
            goes_on = f"is finished; waiting {node_timeout_s:g} s for a master that goes on with it"
            present = f" (the run there {goes_on})" if is_over else _present(run_dir, board, newest, waited_s)
            log.info("waiting for the master at %s%s", run_dir.root, present)
        if waited_s >= due_s:
            present = _present(run_dir, board, newest, waited_s)
            log.info("waiting for the master at %s for %.0f s%s", run_dir.root, waited_s, present)
            due_s = waited_s + REMINDER_S
    raise NodeEnded(
        Exit.LOST,
        f"no master came within {timeout_s:.0f} s at {run_dir.root}{what_is_there(run_dir)}; start it there "
        "with run --master, and check that all nodes see the same directory",
    )


def _present(run_dir: RunDir, board: Board, newest: EpochRecord | None, waited_s: float) -> str:
    """Return, in brackets, what is where a master is waited for, and how it goes on; nothing for a node that
    another command has started with its master.
    """
    if STARTED_BY in os.environ:
        return ""
    epoch = 0 if newest is None else newest.epoch
    ended = [flag for flag in board.calls if flag.epoch == epoch and _is_end(flag)]
    if newest is None or not (ended or waited_s):  # at first a living master has had no time to beat
        return what_is_there(run_dir)
    kind = ended[0].kind if ended else ""
    state = ENDS.get(kind, "has no master that beats")
    command = node_command(run_dir.root, run_dir.machine(MASTER))
    return f" (the run there {state}; to go on, on {newest.master_host}: {command})"


def _is_end(flag: Flag) -> bool:
    """Return whether the master has said by this flag that it has ended."""
    return flag.rank == MASTER and flag.kind in ENDS


def what_is_there(run_dir: RunDir) -> str:
    """Return, in brackets, what is where a master is waited for; nothing where a run is."""
    root, parent = run_dir.root, run_dir.root.parent
    existing = next(path for path in root.parents if files.is_directory(path))
    if existing != parent and Path.cwd().absolute() in (existing.absolute(), *existing.absolute().parents):
        return NOTHING_YET
    if existing != parent:
        return f" ({parent} is not there now: is it mounted here?)"
    names_beside = files.listing(parent)  # what it does not list is not looked up: see _protocol
    if root.name in names_beside and has_run(root):
        return ""
    is_there = root.name in names_beside
    run_hint = runs_near(root)
    if not is_there and not run_hint:
        return NOTHING_YET
    return f" ({'no run has begun' if is_there else 'nothing is'} there{run_hint})"


def patience(timeout_s: float, least_s: float = 0.01) -> Iterator[float]:
    """Yield the seconds waited so far, each at least `least_s` later, until `timeout_s`."""
    started_s = time.monotonic()
    yield 0.0
    while (waited_s := time.monotonic() - started_s) < timeout_s:
        time.sleep(min(max(0.05 * waited_s, least_s), 0.5))
        yield waited_s


def _protocol(run_dir: RunDir) -> Board | None:
    """Return the snapshot, an empty one while its run.json is not there, None without the directory.
    SettingsError for a file in its place, or a run of another format.

    Each level is looked up only once its parent lists it: a client may cache "no such file" for a minute.
    """
    shown = next(path for path in run_dir.root.parents if files.is_directory(path))
    for part in run_dir.root.relative_to(shown).parts:
        if part not in files.listing(shown):
            return None
        shown = shown / part
        if not files.is_directory(shown):
            raise SettingsError(f"--log-path {run_dir.root}: {shown} is a file; give a directory")
    crew = run_dir.master.parent
    if {run_dir.run_json.name, crew.parent.name} - set(files.listing(shown)):
        return parse([])
    read_run_json(run_dir)  # not before protocol/ is there, which is made later: it may be half written
    if crew.name not in files.listing(crew.parent):
        return parse([])
    if {directory.name for directory in run_dir.protocol} - set(files.listing(crew)):
        return parse([])
    return parse(files.listing(run_dir.master))
