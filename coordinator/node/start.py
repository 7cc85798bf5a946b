"""START: what is checked before a node takes part. For a node that may not, nothing is written. But a worker
that has found its master, and lacks what the run needs, says so in protocol/.
"""

import contextlib
import json
import logging
import os
import secrets
import shlex
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator import config
from coordinator.directory import published
from coordinator.directory.layout import FORMAT, MASTER, Beat, Flag, RunDir, parse_protocol_name
from coordinator.journal.trackers import check_sinks
from coordinator.node.inputs import NODE_LOCAL, Inputs, difference, load_inputs
from coordinator.node.kept import Change, changes, with_kept
from coordinator.node.refusals import fit_max_tokens
from coordinator.node.strangers import refuse_strangers
from coordinator.protocol.complaints import complain
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, parse, whole_board
from coordinator.settings import TINY, ClusterSettings, Crew, RunSettings, SettingsError
from rollout.storage import files, once
from trainer.settings import LoraSettings

log = logging.getLogger(__name__)

LARGE_STATE_BYTES = 20 * 10**9
"""An optimizer's state above this is saved only RARELY, unless the user says how often."""
RARELY = 10
ASKED = 5
"""How often a filesystem that says no is asked whether this user may write: its errors look the same."""


@dataclass(frozen=True)
class Start:
    """What START found."""

    rank: int
    run_dir: RunDir
    run_id: str
    settings: RunSettings
    inputs: Inputs
    incarnation_floor: int
    """The highest incarnation of this rank so far."""
    newest_epoch: int
    left_behind: tuple[Path, ...] = ()
    """Heartbeats and flags of earlier processes of this rank."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the master: what this start was given, over what the last one was given."""
    changes: Sequence[Change] = ()
    """Of the master: settings that are not what they were at the last start."""


def last_start(root: Path, crew: Crew = "main") -> EpochRecord | None:
    """Return the newest record of the run at `root`; None if no master has been in an epoch yet.

    Raises SettingsError for a run of another format.
    """
    run_dir = RunDir(root, crew)
    if not files.is_directory(root) or run_dir.run_json.name not in files.listing(root):
        return None
    read_run_json(run_dir)
    return Records(run_dir).newest(whole_board(run_dir, published.names).records)


def resume_given(root: Path, given: Mapping[str, Any], reset: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that a start of the master at `root` goes by: `given` over what is kept."""
    return with_kept(absolute(given), last_start(root), reset)


def start_master(
    root: Path,
    given: Mapping[str, Any],
    allow_shared_dir: bool = False,
    reset: Collection[str] = (),
    crew: Crew = "main",
) -> Start:
    """Check everything, then make the directory and run.json. SettingsError: nothing was written.

    What `given` leaves out is as at the last start, but for the settings in `reset`.
    """
    check_log_path(root)
    last = last_start(root, crew)
    refuse_strangers(root, allow_shared_dir)
    given = with_kept(absolute(given), last, reset)
    settings = config.build(given).of_crew(crew)
    run_dir = RunDir(root, crew)
    inputs = load_inputs(settings, given, run_dir.machine(MASTER))
    settings = fit_max_tokens(settings, given, inputs.context)
    check_sinks(settings.metrics)
    if settings.eval.samples_per_task > 1 and settings.eval.temperature == 0:
        samples = settings.eval.samples_per_task
        log.warning("eval.temperature=0: all %d samples of a task are the same, so pass@k is pass@1", samples)
    if settings.rollout.top_p < 1 and settings.rl_phase != "rollout":
        log.warning(
            "rollout.top_p=%g: the engine's logprobs differ from the trainer's", settings.rollout.top_p
        )
    fixed = _fixed(settings, inputs)
    if files.is_directory(root) and run_dir.run_json.name in files.listing(root):
        run = read_run_json(run_dir)
        _refuse_changes(run, fixed)
    else:
        run = _make_run(run_dir, fixed, RARELY if inputs.state_bytes > LARGE_STATE_BYTES else 1)
    settings = with_save_interval(settings, run, inputs.state_bytes)
    for directory in run_dir.fixed_directories:
        files.make_directory(directory)
    start = _begin(MASTER, run_dir, run["run_id"], settings, inputs)
    return replace(start, given=given, changes=changes(last, settings))


def start_worker(
    root: Path, rank: int, given: Mapping[str, Any], allow_shared_dir: bool = False, crew: Crew = "main"
) -> Start:
    """Wait for a living master, take its settings, and refuse what contradicts them."""
    run_dir = RunDir(root, crew)
    given = absolute(given)
    mine = config.check_each(given)
    _refuse_rank(rank, mine.get("cluster.num_nodes", rank + 1), "")
    defaults = ClusterSettings()
    published = _await_master(
        run_dir,
        mine.get("cluster.rejoin_timeout_s", defaults.rejoin_timeout_s),
        mine.get("cluster.node_timeout_s", defaults.node_timeout_s),
    )
    check_log_path(root)
    refuse_strangers(root, allow_shared_dir)
    settings = RunSettings.published(published.settings)
    _refuse_rank(rank, settings.cluster.num_nodes, "the master's ")
    shared = {key: value for key, value in given.items() if key not in NODE_LOCAL}
    if differences := config.contradictions(settings, shared):
        raise SettingsError(f"{differences[0]}; leave it out: a worker takes its settings from the master")
    local = {key: value for key, value in given.items() if key in NODE_LOCAL}
    settings = config.overlay(settings, local)
    run = read_run_json(run_dir)
    try:
        inputs = load_inputs(settings, local, run_dir.machine(rank))
        _refuse_changes(run, _fixed(settings, inputs))
        if text := difference(inputs.codes(), published.inputs, published.master_host):
            raise SettingsError(text)
    except Exception as error:  # the master waits for this worker
        host = socket.gethostname()
        with contextlib.suppress(OSError):
            complain(run_dir, published.epoch, rank, host, f"rank {rank} ({host}) could not start: {error}")
        raise
    return _begin(rank, run_dir, run["run_id"], settings, inputs)


def absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return paths as every node finds them, whatever directory it was started in."""

    def resolved(key: str, value: Any) -> Any:
        is_path = key in {"model", "tasks", "eval_tasks", "data_path", "cluster.local_dir"}
        return str(Path(value).absolute()) if is_path and files.exists(Path(str(value))) else value

    return {key: resolved(key, value) for key, value in given.items()}


def _refuse_rank(rank: int, num_nodes: int, whose: str) -> None:
    if rank >= num_nodes:
        raise SettingsError(
            f"--worker {rank} is outside {whose}--num-nodes {num_nodes} "
            f"(workers are 1 to {num_nodes - 1}); leave this node out, or give it more"
        )


def check_log_path(root: Path) -> None:
    """SettingsError unless `root` is, or can become, a directory that we may write.

    Only below the current directory more than the last part of it may be missing (runs/default): elsewhere it
    is a mount that is not there, or a slip of the pen.
    """
    existing = next(path for path in (root, *root.parents) if files.exists(path))
    if not files.is_directory(existing):
        raise SettingsError(f"--log-path {root}: {existing} is a file; give a directory")
    here = Path.cwd()
    if existing not in (root, root.parent) and here not in (existing, *existing.parents):
        raise SettingsError(
            f"--log-path {root}: there is no directory {root.parent}; is it mounted here? If the path is "
            f"right, make it first: mkdir -p {shlex.quote(str(root.parent))}"
        )
    if not any(os.access(existing, os.W_OK | os.X_OK) for _ in range(ASKED)):
        raise SettingsError(f"--log-path {root}: {existing} is not writable for this user")


def read_run_json(run_dir: RunDir) -> dict[str, Any]:
    """run.json of this format; SettingsError for another."""
    try:
        run = json.loads(files.read(run_dir.run_json))
    except ValueError as error:
        raise SettingsError(
            f"{run_dir.run_json} is damaged ({error}); restore it or use another log path"
        ) from None
    found = run.get("format") if isinstance(run, dict) else None  # pyright: ignore
    if found != FORMAT:
        raise SettingsError(
            f"--log-path {run_dir.root} holds a run of format {found}, this version writes "
            f"format {FORMAT}; use another log path"
        )
    return run  # pyright: ignore[reportUnknownVariableType]


def _fixed(settings: RunSettings, inputs: Inputs) -> dict[str, Any]:
    """Return what may not change between two starts, each with the name that a person gives it."""
    tiny = f"{TINY}, tiny.warmup_steps={settings.tiny.warmup_steps}"
    model = settings.model if inputs.model_digest else tiny
    seed = str(settings.rollout.seed)
    return {  # the seed first: the built-in tasks and model follow from it
        "rollout.seed": {"name": seed, "digest": seed},
        "model": {"name": model, "digest": inputs.model_digest or tiny},
        "tasks": {"name": settings.tasks, "digest": inputs.tasks.digest},
        "trainer.lora": _adapters(settings.trainer.lora),
    }


def _adapters(lora: LoraSettings) -> dict[str, str]:
    name = f"rank={lora.rank} alpha={lora.alpha:g} targets={lora.targets}" if lora.rank else "rank=0"
    return {"name": name, "digest": name}


def _refuse_changes(run: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for key, now in fixed.items():
        then = run["fixed"][key]
        if then["digest"] != now["digest"]:
            content = " (same name, other content)" if then["name"] == now["name"] else ""
            raise SettingsError(
                f"{config.option_name(key)} is {now['name']}{content}, but this run was started with "
                f"{then['name']}; to start anew, use another log path"
            )


def with_save_interval(settings: RunSettings, run: Mapping[str, Any], state_bytes: int) -> RunSettings:
    """Return the settings with the trainer.save_interval that the run's first start has chosen by the size of
    the state, unless the user gives one. `run` is run.json.
    """
    trainer = settings.trainer
    if trainer.save_interval is None:
        value = run.get("save_interval", 1) if trainer.keep_alive else 1
        settings = config.overlay(settings, {"trainer.save_interval": value})
    if state_bytes > LARGE_STATE_BYTES and settings.rl_phase != "rollout":
        every = settings.trainer.state_interval
        log.info(
            "the optimizer's state has %.0f GB: trainer.save_interval=%d saves it in %s iteration",
            state_bytes / 1e9,
            every,
            f"every {every}th" if every > 1 else "each",
        )
    return settings


def _make_run(run_dir: RunDir, fixed: Mapping[str, Any], save_interval: int) -> dict[str, Any]:
    """Create run.json; if another master was first, take over what it has written."""
    files.make_directory(run_dir.root)
    run = {
        "run_id": secrets.token_hex(6),
        "format": FORMAT,
        "fixed": fixed,
        "save_interval": save_interval,
    }
    if once.create_once(run_dir.run_json, json.dumps(run, indent=1).encode()):
        return run
    run = read_run_json(run_dir)
    _refuse_changes(run, fixed)
    return run


def _begin(rank: int, run_dir: RunDir, run_id: str, settings: RunSettings, inputs: Inputs) -> Start:
    board = whole_board(run_dir)
    newest = Records(run_dir).newest(board.records)
    listed = newest.members[rank].incarnation if newest and rank in newest.members else 0
    floor = max(board.highest_incarnation(rank), listed)
    left_behind = _left_behind(run_dir.protocol_of(rank), rank)
    return Start(rank, run_dir, run_id, settings, inputs, floor, board.newest_epoch(), left_behind)


def _left_behind(directory: Path, rank: int) -> tuple[Path, ...]:
    """Return the heartbeats and flags of `rank`, also those that were never published."""
    found: list[Path] = []
    for name in files.listing(directory):
        entry = parse_protocol_name(files.published_name(name))
        if isinstance(entry, Beat | Flag) and entry.rank == rank:
            found.append(directory / name)
    return tuple(found)


def _await_master(run_dir: RunDir, timeout_s: float, node_timeout_s: float) -> EpochRecord:
    """Return the newest record of a master whose beat moves: what a dead run has left does not count."""
    records, first, said_s = Records(run_dir), None, 0.0
    for waited_s in _patience(timeout_s):
        board = _protocol(run_dir)
        beat = board.beats.get(MASTER)
        if first is None and waited_s == 0.0:
            first = beat
        newest = records.newest(board.records)
        moved = beat is not None and (first is None or beat[2:] > first[2:])
        if newest and beat and moved and newest.master_incarnation == beat.incarnation:
            return newest
        if newest and newest.kind == "finished" and waited_s > node_timeout_s:
            raise Ended(Exit.DONE, f"the run at {run_dir.root} is finished")
        if waited_s == 0.0:
            parent = run_dir.root.parent
            absent = (
                "" if files.is_directory(parent) else f" ({parent} is not there now: is it mounted here?)"
            )
            log.info("waiting for the master at %s%s", run_dir.root, absent)
        if waited_s > said_s + 30.0:
            log.info("waiting for the master at %s for %.0f s", run_dir.root, waited_s)
            said_s = waited_s
    raise Ended(
        Exit.LOST,
        f"no master came within {timeout_s:.0f} s at {run_dir.root}; start it there with run --master, "
        "and check that all nodes see the same directory",
    )


def _patience(timeout_s: float) -> Iterator[float]:
    """Yield the seconds waited so far, each a little later, until `timeout_s`."""
    started_s = time.monotonic()
    yield 0.0
    while (waited_s := time.monotonic() - started_s) < timeout_s:
        time.sleep(min(max(0.05 * waited_s, 0.01), 0.5))
        yield waited_s


def _protocol(run_dir: RunDir) -> Board:
    """Return the snapshot, an empty one while the directory or its run.json is not there. SettingsError for a
    file in its place, or a run of another format.

    Each level is looked up only once its parent lists it: a client may cache "no such file" for a minute.
    """
    shown = next(path for path in run_dir.root.parents if files.is_directory(path))
    for part in run_dir.root.relative_to(shown).parts:
        if part not in files.listing(shown):
            return parse([])
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
