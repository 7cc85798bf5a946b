"""Read what a run has published: policies, manifests, metrics."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.directory.layout import Kind, RunDir, parse_iteration_name, parse_staging_name
from rollout.storage import files
from trainer.documents import DamagedDocument, TrainResult

RESULT = "result.json"
"""The file that is written last into a checkpoint: it lists the files with checksums."""


class Incomplete(RuntimeError):
    """An output that should be there is missing or damaged; the message names it."""


@dataclass(frozen=True)
class Policy:
    """A model directory and the digest of its weights. Iteration 0 is the model that the run started from."""

    iteration: int
    directory: Path
    digest: str


def names(directory: Path) -> list[str]:
    """The names in `directory`; empty if it does not exist."""
    try:
        return files.listing(directory)
    except FileNotFoundError:
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`; None if it is missing or torn. Lists first: clients cache missing names."""
    if path.name not in names(path.parent):
        return None
    try:
        document = json.loads(files.read(path))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None  # pyright: ignore[reportUnknownVariableType]


def metrics_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, by iteration. Of an iteration and kind only the first line is taken:
    a master that was suspended while it appended a line may append it again.
    """
    if run_dir.metrics.name not in names(run_dir.root):
        return []
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for text in files.read(run_dir.metrics).splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("iteration"), int) and "kind" in line:  # pyright: ignore
            lines.setdefault((line["iteration"], line["kind"]), line)  # pyright: ignore
    return sorted(lines.values(), key=lambda line: line["iteration"])


def read_manifest(run_dir: RunDir, kind: Kind, iteration: int) -> dict[str, Any] | None:
    """The manifest of an iteration; None if it is missing or torn."""
    return read_json(run_dir.manifest(kind, iteration))


def manifest_digest(run_dir: RunDir, iteration: int) -> str:
    """sha256 of the training manifest's bytes."""
    return hashlib.sha256(files.read(run_dir.manifest("train", iteration))).hexdigest()


def checkpoints(run_dir: RunDir) -> list[int]:
    """The iterations that have a published checkpoint, in order."""
    found = (parse_iteration_name(name) for name in names(run_dir.checkpoints))
    return sorted(iteration for iteration in found if iteration is not None)


def policy_of(run_dir: RunDir, iteration: int) -> Policy:
    """The published checkpoint of `iteration`."""
    directory = run_dir.checkpoint(iteration)
    return Policy(iteration, directory, read_result(directory).policy)


def latest_before(run_dir: RunDir, iteration: int) -> int:
    """The newest checkpoint older than `iteration`; 0 when there is none yet."""
    return max((number for number in checkpoints(run_dir) if number < iteration), default=0)


def read_result(directory: Path) -> TrainResult:
    """Read result.json of a checkpoint or staging directory. Incomplete says what is wrong."""
    if RESULT not in names(directory):
        raise Incomplete(f"{directory} has no {RESULT}: it was not finished")
    try:
        return TrainResult.from_json(files.read(directory / RESULT))
    except DamagedDocument as error:
        raise Incomplete(f"{directory / RESULT} is damaged: {error}") from None


def verify_checkpoint(directory: Path) -> TrainResult:
    """The result, after size and checksum of every file in it were verified. Raises Incomplete."""
    result = read_result(directory)
    found = {
        f"{prefix}{name}": facts
        for prefix, folder in (("", directory), ("trainer_state/", directory / "trainer_state"))
        if folder.name in names(folder.parent)
        for name, facts in files.checksums(folder).items()
    }
    for name, facts in result.files.items():
        if found.get(name) != facts:
            raise Incomplete(f"{directory / name} is missing or differs from {RESULT}")
    return result


def complete_staging(run_dir: RunDir, iteration: int) -> Path | None:
    """The newest staging directory of `iteration` that has a result; None if there is none."""
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
