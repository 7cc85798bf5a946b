"""`run cleanup`: remove what an interrupted iteration left, once no node beats any more.

It first claims an epoch, so that a node that is suspended in an older one is replaced when it wakes. What was
made last is removed first (staging, batch, evaluation, manifest, parts, iteration.json), so that every output
has its sources: if the removal is interrupted, the iteration can be resumed, or cleaned again.
"""

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from coordinator.console.commands.leftovers import Leftover, LeftoverKind, Plan, last_begun, look, plan
from coordinator.directory import manifests, published
from coordinator.directory.file_names import parse_staging_name, parse_state_name
from coordinator.directory.layout import MASTER, REMOVED, RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.published import Incomplete
from coordinator.journal.control_characters import one_line
from coordinator.keeping import resume
from coordinator.phases.provenance import origin_of
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.heartbeat import read_beat
from coordinator.protocol.placement_records import run_dirs
from coordinator.protocol.records import EpochRecord, Records, claim_stopped
from coordinator.protocol.snapshot import Board, whole_board
from coordinator.protocol.watch import ENDED
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.directory_access import share_with_group
from coordinator.start.run_json import find_run
from rollout.storage import files, once
from rollout.trajectory import Group

Boards = Mapping[RunDir, Board]
"""What each crew shows in protocol/."""

BEATS = 3
LOOK_AGAIN_S = 1.0
"""How often a long removal checks whether a node has come back."""


def cleanup(root: Path, iteration: int, dry_run: bool = False, keep_partial: bool = False) -> None:
    """Remove what interrupted `iteration` left, and print each path.

    Raises SettingsError if there is no run or the iteration is finished, and Ended (failed) if a node beats
    or there is no finished group to keep. Then nothing was removed, unless a node came back in the middle.
    """
    run_dir = RunDir(root)
    share_with_group(root)
    run_id = find_run(root)["run_id"]
    crews = _begun(run_dirs(root))
    newest = {crew: Records(crew).newest(whole_board(crew, published.names).records) for crew in crews}
    settings = [RunSettings.published(record.settings if record else {}) for record in newest.values()]
    _refuse_finished(run_dir, settings[0], iteration)
    listed, keep = look(crews, iteration), _vouched(run_dir, iteration)
    if plan(_next_epochs(_boards(crews)), iteration, listed, keep).has_nothing():
        print(f"iteration {iteration} has left nothing in {root}: there is nothing to do")
        return
    boards = _boards(crews)
    if not all(_have_ended(crew, board) for crew, board in boards.items()):
        boards = _wait_for_beats(crews, max(patience_s(each.cluster) for each in settings))
    _refuse_finished(run_dir, settings[0], iteration)  # a node may have finished it just before its end
    numbers = _next_epochs(boards)
    listed, keep = look(crews, iteration), _vouched(run_dir, iteration)
    planned = plan(numbers, iteration, listed, keep)
    partial = _partial(run_dir, iteration) if keep_partial else None
    if partial is not None:
        manifest = partial[0]
        keep |= _named(run_dir, iteration, manifest)
        planned = plan(numbers, iteration, listed, keep)
        print(f"keeps {manifest['groups']} of {manifest['slots']} groups, named by its manifest.json")
    if not dry_run:
        for crew, record in newest.items():
            _claim(crew, run_id, record, iteration, numbers[crew])
        _refuse_newcomers(boards, numbers)
        if partial is not None:
            _publish(run_dir, iteration, *partial)
    _remove_all(run_dir, planned, boards, numbers, dry_run)


def refuse_unnamed(root: Path) -> NoReturn:
    """Raise SettingsError that names the iteration which a person can mean."""
    find_run(root)
    iteration = last_begun(RunDir(root))
    begun = "none was begun" if iteration is None else f"the last that was begun is {iteration}"
    raise SettingsError(
        f"--iteration N is missing: the interrupted iteration; {begun}; see run cleanup --help"
    )


def _begun(crews: Sequence[RunDir]) -> Sequence[RunDir]:
    """Return the crews of which a node was there; a single crew in any case."""
    return [crew for crew in crews if published.names(crew.master)] or crews[:1]


def _boards(crews: Iterable[RunDir]) -> Boards:
    return {crew: whole_board(crew, published.names) for crew in crews}


def _next_epochs(boards: Boards) -> dict[RunDir, int]:
    """Return the epoch that is claimed in each crew."""
    return {crew: board.newest_epoch() + 1 for crew, board in boards.items()}


# ---- what must not go


def _refuse_finished(run_dir: RunDir, settings: RunSettings, iteration: int) -> None:
    newest = max(published.checkpoints(run_dir), default=0)  # metrics.jsonl may have lost lines
    if iteration <= newest or iteration < resume.next_iteration(FinishedIterations(run_dir), settings):
        raise SettingsError(f"iteration {iteration} is finished, nothing is removed")


def _vouched(run_dir: RunDir, iteration: int) -> set[Path]:
    """Return the sources of a metrics line of another kind of run: a finished rollout or evaluation."""
    lines = published.metrics_lines(run_dir)
    kinds = {line["kind"] for line in lines if line["iteration"] == iteration}
    vouched: set[Path] = set()
    if kinds & {"rollout", "eval"}:
        vouched |= {run_dir.trajectories("eval", iteration), run_dir.iteration_json(iteration)}
    if "rollout" in kinds:
        vouched.add(run_dir.trajectories("train", iteration))
    return vouched


# ---- what --keep-partial keeps


def _partial(run_dir: RunDir, iteration: int) -> tuple[dict[str, Any], list[Group]]:
    """Return the published manifest, or a new one over finished groups, with these. Ended if none is
    finished.
    """
    if manifest := published.read_manifest(run_dir, "train", iteration):
        return manifest, []
    opened = published.read_json(run_dir.iteration_json(iteration))
    directory = run_dir.trajectories("train", iteration)
    document: dict[str, Any] = {"groups": 0}
    groups: list[Group] = []
    if opened is not None:
        sampler = min(opened["policy_iteration"], published.latest_before(run_dir, iteration))
        try:
            policy = published.policy_of(run_dir, sampler).digest if sampler else opened["policy"]
            origin = origin_of(opened, "train", policy, sampler)
            document, groups = manifests.manifest(
                directory, iteration, resume.quota(opened), origin, short=None
            )
        except Incomplete as error:
            raise NodeEnded(Exit.FAILED, f"{error}; nothing was removed") from None
    if document["groups"] == 0:
        text = f"{directory} holds no finished group of iteration {iteration}: nothing can be kept"
        raise NodeEnded(
            Exit.FAILED, f"{text}, and nothing was removed; to remove the rest, omit --keep-partial"
        )
    return document, groups


def _named(run_dir: RunDir, iteration: int, manifest: Mapping[str, Any]) -> set[Path]:
    """Return the manifest with its groups.jsonl, and its sources."""
    paths = [run_dir.trajectories("train", iteration) / part["file"] for part in manifest["parts"]]
    documents = (run_dir.manifest("train", iteration), run_dir.groups("train", iteration))
    return {*documents, run_dir.iteration_json(iteration), *paths}


def _publish(run_dir: RunDir, iteration: int, manifest: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Publish the manifest before anything is removed. Raises Ended if there is another one now."""
    path = run_dir.manifest("train", iteration)
    if path.name in published.names(path.parent) and published.read_json(path) is None:
        once.withdraw(path, path.with_suffix(".damaged"))
    if groups:
        manifests.publish_manifest(path, manifest, groups)
    manifests.ensure_readable(path)
    if published.read_json(path) != manifest:
        raise NodeEnded(
            Exit.FAILED, f"another manifest was published just now as {path}; run the command again"
        )


# ---- who is still there


def patience_s(cluster: ClusterSettings) -> float:
    """Return how long a node may be silent until it is taken for gone: as in the run itself."""
    return max(BEATS * cluster.beat_interval_s, cluster.node_timeout_s)


def _have_ended(crew: RunDir, board: Board) -> bool:
    """Return whether all nodes, and with them their children, have said that they have ended."""
    return all(read_beat(crew, beat).get("state") == ENDED for beat in board.beats.values())


def _wait_for_beats(crews: Iterable[RunDir], look_s: float) -> Boards:
    """Return the Boards of the crews, after `look_s` in which no node has beaten. Ended names the nodes that
    have.
    """
    print(f"looking for {look_s:g} s whether a node still beats", flush=True)
    before = now = _boards(crews)
    deadline_s = time.monotonic() + look_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(LOOK_AGAIN_S, left_s))
        now = _boards(before)
        _refuse_beats(before, now)
    return now


def with_new_beats(before: Board, now: Board) -> list[int]:
    """Ranks that have beaten between two listings."""
    since = {rank: beat[2:] for rank, beat in before.beats.items()}
    return sorted(rank for rank, beat in now.beats.items() if beat[2:] > since.get(rank, (0, -1)))


def _refuse_beats(before: Boards, now: Boards) -> None:
    """Raise Ended if nodes have beaten. It says who and where they are, and how to stop them."""
    nodes = [(crew, rank) for crew, board in now.items() for rank in with_new_beats(before[crew], board)]
    if not nodes:
        return
    contents = {node: _said(*node) for node in nodes}
    hosts = {node: content.get("host", "host unknown") for node, content in contents.items()}
    names = ", ".join(f"{crew.name(rank)} ({hosts[crew, rank]})" for crew, rank in nodes)
    masters = [node for node in nodes if node[1] == MASTER]
    stopped = masters[:1] or nodes  # stopping a master stops all
    advice = ", ".join(f"kill -INT {contents[node].get('pid', 'PID')} on {hosts[node]}" for node in stopped)
    beat = "beats" if len(nodes) == 1 else "beat"
    raise NodeEnded(Exit.FAILED, f"{names} still {beat}: stop the run first: {advice}, or Ctrl+C there")


def _said(run_dir: RunDir, rank: int) -> dict[str, Any]:
    """Return the content of the newest beat of `rank`; {} if it cannot be read, because each replaces the
    last.
    """
    for _attempt in range(3):
        beat = whole_board(run_dir, published.names).beats[rank]
        if content := read_beat(run_dir, beat):
            return content
    return {}


def _refuse_newcomers(boards: Boards, claimed: Mapping[RunDir, int]) -> None:
    """Raise Ended if a node has beaten since `boards`, or if there is an epoch above `claimed`."""
    now = _boards(boards)
    _refuse_beats(boards, now)
    for crew, board in now.items():
        if board.newest_epoch() > claimed[crew]:
            text = f"epoch {board.newest_epoch()} of {crew.root} was claimed just now: a node has started"
            raise NodeEnded(Exit.FAILED, f"{text}; stop it first")


def _claim(run_dir: RunDir, run_id: str, newest: EpochRecord | None, iteration: int, number: int) -> None:
    """Claim epoch `number`, which has no nodes, and say there that the run is stopped."""
    text = f"run cleanup --iteration {iteration} has stopped the run, on {socket.gethostname()}"
    if not claim_stopped(run_dir, run_id, newest, number, text):
        text = f"epoch {number} of {run_dir.root} was claimed just now: a node has started; stop it first"
        raise NodeEnded(Exit.FAILED, text)


# ---- the removal


def _remove_all(
    run_dir: RunDir, planned: Plan, boards: Boards, claimed: Mapping[RunDir, int], dry_run: bool
) -> None:
    """Remove what is planned, or only print it. Raises Ended if a node comes back meanwhile."""
    looked_s, total = time.monotonic(), 0
    verb = "would remove" if dry_run else "removed"
    for leftover in planned.leftovers:
        if not dry_run and time.monotonic() - looked_s > LOOK_AGAIN_S:
            _refuse_newcomers(boards, claimed)
            looked_s = time.monotonic()
        total += (size := _size(leftover.path))
        if not dry_run:
            _remove(run_dir, leftover)
        where = one_line(str(leftover.path.relative_to(run_dir.root)))
        print(f"{verb} {where} ({leftover.kind}, {size:,} bytes)", flush=True)
    for path in planned.unknown:
        print(f"stays: {one_line(str(path.relative_to(run_dir.root)))} (not a file of flagpost)")
    print(f"{verb} {len(planned.leftovers)} paths, {total:,} bytes")


def _remove(run_dir: RunDir, leftover: Leftover) -> None:
    path = leftover.path
    if leftover.kind not in {LeftoverKind.STAGING, LeftoverKind.STATE}:
        (files.remove_any if leftover.kind is LeftoverKind.TEMPORARY else files.remove)(path)
        return
    if staged := parse_staging_name(path.name):
        # Rename it first: a master that wakes must not publish a half removed checkpoint.
        path = run_dir.removed(*staged)
        files.rename(leftover.path, path)
    elif parse_state_name(path.name):
        path = path.with_name(f"{REMOVED}{path.name}")
        files.rename(leftover.path, path)
    files.remove_tree(path)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; 0 for what cannot be read."""
    try:
        is_tree = path.is_dir() and not path.is_symlink()
        return sum(map(_size, path.iterdir())) if is_tree else path.lstat().st_size
    except OSError:  # only a figure for people
        return 0
