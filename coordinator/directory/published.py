"""Read what a run has published: policies, manifests, metrics."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coordinator.directory.file_names import parse_iteration_name, parse_staging_name
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.metrics_file import MetricsFile
from rollout.engines.model_dir import is_model_file
from rollout.environment_variables import cores
from rollout.storage import files, hashing
from rollout.storage.hashing import CountBytes, unheard
from trainer.documents import RESULT, STATE_DIR, DamagedDocument, TrainResult

VERIFIED = ".verified.json"
"""File of a checkpoint that somebody has read back, and found whole. A dot: no file of the model."""
DAMAGED = ".damaged.json"
"""File of a checkpoint that somebody has read back, and not found whole."""


_HALF_PICTURE = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")


class Incomplete(RuntimeError):
    """An output that should be there is missing or damaged; the message names it."""


@dataclass(frozen=True)
class Policy:
    """A model directory and the digest of its weights. Iteration 0 is the model that the run started from."""

    iteration: int
    directory: Path
    digest: str
    result: TrainResult | None = field(default=None, compare=False, repr=False)
    """What its training has said; of a checkpoint."""


def names(directory: Path) -> list[str]:
    """Return the names in `directory`; empty if it does not exist."""
    try:
        return files.listing(directory)
    except FileNotFoundError:
        return []


def half_pictures(run_dir: RunDir) -> list[Path]:
    """Return the temporary files of pictures, of nodes that were killed in the moment. One that is just being
    written is written again by its process, if it is removed.
    """
    return [run_dir.images / name for name in names(run_dir.images) if _HALF_PICTURE.fullmatch(name)]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the document at `path`; None if it is missing or torn. Lists first: clients cache
    missing names.
    """
    if path.name not in names(path.parent):
        return None
    try:
        document = json.loads(files.read(path))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None  # pyright: ignore[reportUnknownVariableType]


def metrics_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl, by iteration; of an iteration and kind only the first line."""
    return MetricsFile(run_dir).read()


def read_manifest(run_dir: RunDir, kind: Kind, iteration: int) -> dict[str, Any] | None:
    """Return the manifest of an iteration; None if it is missing or torn."""
    return read_json(run_dir.manifest(kind, iteration))


def manifest_digest(run_dir: RunDir, iteration: int) -> str:
    """sha256 of the training manifest's bytes."""
    return hashlib.sha256(files.read(run_dir.manifest("train", iteration))).hexdigest()


def checkpoints(run_dir: RunDir, names: Callable[[Path], list[str]] = names) -> list[int]:
    """Return the iterations that have a published checkpoint, in order; `names` lists a directory."""
    numbers = (parse_iteration_name(name) for name in names(run_dir.checkpoints))
    return sorted(iteration for iteration in numbers if iteration is not None)


def is_part_of_model(name: str) -> bool:
    """Return whether a file of a checkpoint, by its path below it, is loaded by engines."""
    return not name.startswith(f"{STATE_DIR}/") and is_model_file(PurePosixPath(name).name)


def policy_of(run_dir: RunDir, iteration: int) -> Policy:
    """Return the published checkpoint of `iteration`."""
    directory = run_dir.checkpoint(iteration)
    result = read_result(directory)
    return Policy(iteration, directory, result.policy, result)


def latest_before(run_dir: RunDir, iteration: int) -> int:
    """Return the newest checkpoint older than `iteration`; 0 when there is none yet."""
    return max((number for number in checkpoints(run_dir) if number < iteration), default=0)


def read_result(directory: Path) -> TrainResult:
    """Read result.json of a checkpoint, or of a staging directory that has one. Incomplete says what is
    wrong.
    """
    try:
        return TrainResult.from_json(files.read(directory / RESULT))
    except FileNotFoundError:
        raise Incomplete(f"{directory} has no {RESULT}: it was not finished") from None
    except DamagedDocument as error:
        raise Incomplete(f"{directory / RESULT} is damaged: {error}") from None


def weigh_checkpoint(directory: Path) -> TrainResult:
    """Return the result, after name and size of every file in it were compared. Raises Incomplete."""
    result = read_result(directory)
    stats = _stats(directory, result)
    for name, facts in result.files.items():
        if name not in stats or stats[name][0] != facts["bytes"]:
            raise Incomplete(f"{directory / name} is missing or differs from {RESULT}")
    return result


def verify_checkpoint(
    directory: Path,
    count_bytes: CountBytes = unheard,
    threads: int = 8,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> TrainResult:
    """Return the result, after size and checksum of every file in it whose name is wanted were verified;
    reads all of these.

    `count_bytes` gets the size of each piece that was read, in any thread. Raises Incomplete.
    """
    result = weigh_checkpoint(directory)
    names = [name for name in result.files if is_wanted(name)]

    def verify(name: str) -> bool:
        try:
            return hashing.file_facts(directory / name, count_bytes) == result.files[name]
        except FileNotFoundError:
            return False

    with contextlib.ExitStack() as stack:
        map_all = map
        if threads > 1:  # a process does not end before the threads of a pool do
            map_all = stack.enter_context(ThreadPoolExecutor(min(threads, cores()))).map
        for name, is_whole in zip(names, map_all(verify, names), strict=True):
            if not is_whole:
                raise Incomplete(f"{directory / name} is missing or differs from {RESULT}")
    return result


def is_verified(directory: Path) -> bool:
    """Return whether somebody has verified the checkpoint, and size and mtime of each file are as they were
    then.
    """
    document = read_json(directory / VERIFIED)
    try:
        return document is not None and document["files"] == _stats(directory, read_result(directory))
    except (Incomplete, KeyError):
        return False


def verify_and_record(directory: Path, count_bytes: CountBytes = unheard, threads: int = 8) -> None:
    """Verify a checkpoint and write down that it is whole, or what is damaged, once for all nodes.

    Raises Incomplete if it is damaged. The record is a file in it, and goes where the checkpoint goes.
    """
    begun_with = _result_bytes(directory)
    try:
        before = _stats(directory, read_result(directory))
        verify_checkpoint(directory, count_bytes, threads)
    except Incomplete as error:
        # Else it was set aside or removed meanwhile, and maybe trained again.
        if begun_with is not None and _result_bytes(directory) == begun_with:
            _record(directory / DAMAGED, {"text": str(error)})
        raise
    _record(directory / VERIFIED, {"files": before})


def _result_bytes(directory: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return files.read(directory / RESULT) if RESULT in names(directory) else None
    return None


def damage(directory: Path) -> str | None:
    """Return the damage that somebody who has verified the checkpoint has found; None: none so far."""
    document = read_json(directory / DAMAGED)
    return None if document is None else str(document.get("text"))


def _record(path: Path, document: dict[str, Any]) -> None:
    files.publish(path, json.dumps(document, indent=1).encode())


def _stats(directory: Path, result: TrainResult) -> dict[str, list[int]]:
    """Return name -> size and mtime (ns) of the files of `result` that are there."""
    folders = {"": names(directory)}
    stats: dict[str, list[int]] = {}
    for name in result.files:
        path = directory / name
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders[folder] = names(path.parent) if folder.partition("/")[0] in folders[""] else []
        if path.name in folders[folder]:
            stats[name] = list(hashing.size_and_mtime(path))
    return stats


def set_aside(directory: Path, kind: Literal["damaged", "foreign"]) -> None:
    """Give a checkpoint or staging directory a name that nobody looks for; the last of that name goes."""
    aside = directory.with_name(f"{directory.name}.{kind}")
    if aside.name in names(aside.parent):
        files.remove_tree(aside)
    files.rename(directory, aside)


def complete_staging(run_dir: RunDir, iteration: int) -> Path | None:
    """Return the newest staging directory of `iteration` that has a result; None if there is none."""
    staged = sorted(
        (entry[1], name)
        for name in names(run_dir.checkpoints)
        if (entry := parse_staging_name(name)) and entry[0] == iteration
    )
    for _epoch, name in reversed(staged):
        directory = run_dir.checkpoints / name
        if RESULT in names(directory):
            return directory
    return None
