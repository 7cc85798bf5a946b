"""START: what is checked before a node takes part. For a node that may not, nothing is written. But a worker
that has found its master, and lacks what the run needs, says so in protocol/.
"""

import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from coordinator.directory import published
from coordinator.directory.file_names import Beat, Flag, parse_protocol_name
from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal.tracker_feed import check_sinks
from coordinator.machine.gpus import count_gpus
from coordinator.protocol import placement_records
from coordinator.protocol.failed_starts import report_failed_start
from coordinator.protocol.placement_records import Placement
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import whole_board
from coordinator.settings import loading
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.placement import CREWS
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.directory_access import refuse_strangers
from coordinator.start.eval_tasks import RunTasks, warn_of_training_tasks
from coordinator.start.inputs import (
    NODE_LOCAL,
    Inputs,
    base_model_dir,
    difference,
    engine_of,
    load_inputs,
)
from coordinator.start.last_settings import SettingChange, changes, with_kept
from coordinator.start.log_path import check_log_path, check_new_run, refuse_kernel, warn_of_own_disk
from coordinator.start.odd_settings import odd_settings
from coordinator.start.refusals_of_models import fit_max_tokens, warn_of_reward_servers
from coordinator.start.refusals_of_tasks import refuse_no_evaluation
from coordinator.start.request import StartRequest
from coordinator.start.run_json import (
    fixed_of,
    has_run,
    make_run,
    read_run_json,
    refuse_changes,
    refuse_fewer_iterations,
    with_save_interval,
)
from coordinator.start.texts_of_tasks import look_at_text
from coordinator.start.wait_for_master import await_master
from coordinator.start.whole_model import refuse_incomplete
from rollout.environment_variables import is_utf8
from rollout.plugins import with_whole_path
from rollout.settings import JOIN, TINY
from rollout.storage import files
from rollout.tasks.read_rows import is_there

log = logging.getLogger(__name__)

SETS = "eval.sets"


@dataclass
class NodeStart:
    """What START has found out about a node that takes part."""

    rank: int
    run_dir: RunDir
    run_id: str
    settings: RunSettings
    """The settings of this node: its crew's, with its own over them."""
    of_run: RunSettings
    """The settings of the run, which all crews share."""
    inputs: Inputs
    incarnation_floor: int
    """The highest incarnation of this rank so far."""
    newest_epoch: int
    """The highest number of all crews."""
    followed_epoch: int = 0
    """The one in which this node found the master whose settings it takes; 0 for that master itself."""
    left_behind: tuple[Path, ...] = ()
    """Heartbeats and flags of earlier processes of this rank."""
    overrides: Mapping[str, Any] | None = None
    """Settings that the master was given at this start, over those of the last one; None for others."""
    changes: Sequence[SettingChange] = ()
    """Settings of the master that are not what they were at the last start."""


def last_start(root: Path) -> EpochRecord | None:
    """Return the newest record of a master of the run at `root`; None if none has been in an epoch yet.

    Raises SettingsError for a run of another format.
    """
    if not has_run(root):
        return None
    read_run_json(RunDir(root))
    crews = [RunDir(root, crew) for crew in CREWS]
    records = [Records(crew).newest(whole_board(crew, published.names).records) for crew in crews]
    # The leader of another crew takes its settings from the master's: it was not given any.
    return max((record for record in records if record and record.given), key=lambda r: r.epoch, default=None)


def resume_given(request: StartRequest) -> dict[str, Any]:
    """Return the settings that a start of the master goes by: what was given over what is kept."""
    return with_kept(absolute(request.overrides), last_start(request.root), request.reset)


@dataclass(frozen=True)
class CheckedStart:
    """What a start of the master goes by, of which nothing is refused. Nothing is written yet."""

    overrides: Mapping[str, Any]
    settings: RunSettings
    inputs: Inputs
    changes: Sequence[SettingChange]


def check_master(request: StartRequest) -> CheckedStart:
    """Check everything that can be checked before the master writes; SettingsError says what is wrong.

    What was not given is as at the last start, but for the settings that are reset.
    """
    root = request.root
    check_log_path(root)
    last = last_start(root)
    refuse_strangers(root, request.allow_shared_dir)
    overrides = with_kept(absolute(request.overrides), last, request.reset)
    settings = loading.build(overrides)
    if has_run(root):
        refuse_fewer_iterations(root, settings)
    else:
        check_new_run(root, settings)
    run_dir = RunDir(root)
    inputs = load_inputs(settings, overrides, MASTER)
    if has_run(root):
        refuse_changes(read_run_json(run_dir), fixed_of(settings, inputs))
    refuse_no_evaluation(settings, overrides, bool(inputs.eval_tasks or inputs.eval_sets))
    settings = fit_max_tokens(settings, overrides, inputs.context)
    if settings.model != TINY:
        model = base_model_dir(settings, run_dir)
        refuse_incomplete(settings, model)
        if settings.rl_phase != "update":
            engine = engine_of(settings, MASTER)
            code = [text for _file, text in inputs.functions.sources.values()]
            tasks = RunTasks(inputs.tasks, inputs.eval_tasks, inputs.eval_sets)
            look_at_text(settings, model, tasks, engine, code)
    unnamed_tasks = inputs.eval_tasks if settings.eval_tasks else None
    warn_of_training_tasks(inputs.tasks, unnamed_tasks, inputs.eval_sets)
    check_sinks(settings.metrics)
    for text in odd_settings(settings, overrides, inputs.has_end):
        log.warning("%s", text)
    if settings.rl_phase != "update":
        warn_of_reward_servers(settings)
    return CheckedStart(overrides, settings, inputs, changes(last, settings))


def start_master(request: StartRequest, placement: Placement | None = None) -> NodeStart:
    """Check everything as `check_master`, then make the directory and run.json."""
    checked = check_master(request)
    if not has_run(request.root):
        _refuse_missing_gpus(checked.settings.cluster)
        warn_of_own_disk(request.root, checked.settings.cluster.num_nodes)
    run_dir, inputs = placement_records.run_dir(request.root, request.crew, placement), checked.inputs
    run = make_run(run_dir, fixed_of(checked.settings, inputs), inputs.state_bytes)
    settings = with_save_interval(checked.settings, run)
    for directory in run_dir.fixed_directories:
        files.make_directory(directory)
    start = node_start(MASTER, run_dir, run["run_id"], settings, inputs, settings)
    return replace(start, overrides=checked.overrides, changes=checked.changes)


def _refuse_missing_gpus(cluster: ClusterSettings) -> None:
    """Raise SettingsError if this machine has fewer GPUs than it must have, whatever the others have."""
    numbers = cluster.expect_gpus
    if not numbers or cluster.place or (len(numbers) == 1 and cluster.num_nodes > 1):
        return
    if (count := count_gpus()) < numbers[MASTER]:
        text = ",".join(map(str, numbers))
        raise SettingsError(
            f"--expect-gpus {text}: this machine has {count} of {numbers[MASTER]}; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or expect fewer"
        )


def start_worker(request: StartRequest, placement: Placement | None = None) -> NodeStart:
    """Wait for a living master, take its settings, and refuse what contradicts them.

    The first machine of a crew that the master is not in leads that crew: it is the master there, by the
    settings of the run's master. `placement`: the one that the crew is of; None: the one that holds now.
    """
    root, machine, crew = request.root, request.rank, request.crew
    refuse_kernel(root, root.parent)  # no master will come there
    placement = placement or placement_records.read_placement(root)
    run_dir = placement_records.run_dir(root, crew, placement)
    if run_dir.machines and machine not in run_dir.machines:
        raise SettingsError(f"--crew {crew}: rank {machine} of {root} is not in that crew now; leave it out")
    rank = run_dir.rank(machine)
    overrides = absolute(request.overrides)
    given_here = loading.check_each(overrides)
    refuse_rank(machine, given_here.get("cluster.num_nodes", machine + 1), "")
    if names := [loading.option_name(key) for key in overrides if key not in NODE_LOCAL]:
        log.info("a worker takes its settings from the master, and only compares: %s", ", ".join(names))
    defaults = ClusterSettings()
    master_record = await_master(
        run_dir if rank else placement_records.run_dirs(root, placement)[0],
        placement,
        given_here.get("cluster.rejoin_timeout_s", defaults.rejoin_timeout_s),
        given_here.get("cluster.node_timeout_s", defaults.node_timeout_s),
    )
    check_log_path(root)
    refuse_strangers(root, request.allow_shared_dir)
    of_run = RunSettings.published(master_record.settings)
    refuse_rank(machine, of_run.cluster.num_nodes, "the master's ")
    shared = {key: value for key, value in overrides.items() if key not in NODE_LOCAL}
    if differences := loading.contradictions(of_run, shared):
        raise SettingsError(f"{differences[0]}; leave it out: a worker takes its settings from the master")
    local = {key: value for key, value in overrides.items() if key in NODE_LOCAL}
    settings = loading.overlay(of_run, local)
    run = read_run_json(run_dir)
    for directory in () if rank else run_dir.fixed_directories:
        files.make_directory(directory)
    try:
        inputs = load_inputs(settings.of_crew(crew), local, machine)
        refuse_changes(run, fixed_of(settings, inputs))
        if text := difference(inputs.codes(), master_record.inputs, master_record.master_host):
            raise SettingsError(text)
    except Exception as error:  # the master waits for this worker
        host = socket.gethostname()
        with contextlib.suppress(OSError):
            text = f"{run_dir.name(rank)} ({host}) could not start: {error}"
            report_failed_start(run_dir, master_record.epoch, rank, host, text)
        raise
    start = node_start(rank, run_dir, run["run_id"], settings, inputs, of_run)
    return replace(start, followed_epoch=master_record.epoch)


def absolute(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return paths as every node finds them, whatever directory it was started in."""

    def resolved(key: str, value: Any) -> Any:
        if key.startswith(SETS) and isinstance(value, Mapping):  # a table of a settings file
            table = cast("Mapping[str, Any]", value)
            return {name: resolved(f"{key}.{name}", entry) for name, entry in table.items()}
        if key == "rollout.rewards" and isinstance(value, Mapping):
            table = cast("Mapping[str, Any]", value)
            return {name: resolved(f"{key}.{name}", entry) for name, entry in table.items()}
        is_reward = key.endswith(".reward") or key.startswith("rollout.rewards.")
        if (is_reward or key.endswith(".environment")) and value is not None:
            text = JOIN.join(cast("list[str]", value)) if isinstance(value, list) else str(value)
            return JOIN.join(map(with_whole_path, text.split(JOIN)))
        is_path = key in {"model", "tasks", "eval_tasks", "data_path", "cluster.local_dir"}
        is_path = is_path or (key.startswith(f"{SETS}.") and key.endswith(".tasks"))
        if not is_path or not is_there(str(value)):
            return value
        path = Path(str(value)).absolute()
        if not is_utf8(path):  # every node, its engine and its trainer are given this name
            raise SettingsError(f"{key} {path} is not written in UTF-8: give a link to it that is (ln -s)")
        return str(path)

    return {key: resolved(key, value) for key, value in overrides.items()}


def refuse_rank(rank: int, num_nodes: int, whose: str) -> None:
    """Raise SettingsError for a machine that a run of so many nodes does not have."""
    if rank >= num_nodes:
        raise SettingsError(
            f"--worker {rank} is outside {whose}--num-nodes {num_nodes} "
            f"(workers are 1 to {num_nodes - 1}); leave this node out, or give it more"
        )


def node_start(
    rank: int, run_dir: RunDir, run_id: str, settings: RunSettings, inputs: Inputs, of_run: RunSettings
) -> NodeStart:
    """Return the Start of a rank's node."""
    board = whole_board(run_dir)
    newest = Records(run_dir).newest(board.records)
    listed = newest.members[rank].incarnation if newest and rank in newest.members else 0
    floor = max(board.highest_incarnation(rank), listed)
    left_behind = _left_behind(run_dir.protocol_of(rank), rank)
    # Where the devices were placed otherwise before, another crew's numbers are used up.
    run_dirs = [RunDir(run_dir.root, crew) for crew in CREWS]
    epoch = max(whole_board(other, published.names).newest_epoch() for other in run_dirs)
    return NodeStart(
        rank=rank,
        run_dir=run_dir,
        run_id=run_id,
        settings=settings.of_crew(run_dir.crew, run_dir.machines),
        of_run=of_run,
        inputs=inputs,
        incarnation_floor=floor,
        newest_epoch=epoch,
        left_behind=left_behind,
    )


def _left_behind(directory: Path, rank: int) -> tuple[Path, ...]:
    """Return the heartbeats and flags of `rank`, also those that were never published."""
    paths: list[Path] = []
    for name in files.listing(directory):
        entry = parse_protocol_name(files.published_name(name))
        if isinstance(entry, Beat | Flag) and entry.rank == rank:
            paths.append(directory / name)
    return tuple(paths)
