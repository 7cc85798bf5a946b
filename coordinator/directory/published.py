"""What a run has published: policies, manifests, metrics; so every start sees the same."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.directory.layout import Kind, RunDir, parse_iteration_name, parse_staging_name
from rollout.storage import files
from trainer.documents import DamagedDocument, TrainResult

RESULT = "result.json"
"""Written last into a checkpoint: what it holds, with checksums."""


class Incomplete(RuntimeError):
    """An output that should be there is missing or damaged; the text names it."""


@dataclass(frozen=True)
class Policy:
    """A model directory and the digest of its weights; iteration 0 is the model that the run started from."""

    iteration: int
    directory: Path
    digest: str


def names(directory: Path) -> list[str]:
    """The names in `directory`; none if it is not there."""
    try:
        return files.listing(directory)
    except FileNotFoundError:
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`, or None if it is missing or torn. Lists first, for negative caches."""
    if path.name not in names(path.parent):
        return None
    try:
        document = json.loads(files.read(path))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None  # pyright: ignore[reportUnknownVariableType]


def metrics_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, by iteration: of an iteration and kind the first one, and whole ones only.

    It is the one file that is appended to, so a master that was stopped in doing so can add a second line
    when it wakes.
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
    """The manifest of an iteration, or None."""
    return read_json(run_dir.manifest(kind, iteration))


def manifest_digest(run_dir: RunDir, iteration: int) -> str:
    """sha256 of the training manifest's bytes."""
    return hashlib.sha256(files.read(run_dir.manifest("train", iteration))).hexdigest()


def checkpoints(run_dir: RunDir) -> list[int]:
    """Iterations that have a published checkpoint, in order."""
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
    """result.json of a checkpoint or staging directory; Incomplete says what is wrong with it."""
    if RESULT not in names(directory):
        raise Incomplete(f"{directory} has no {RESULT}: it was not finished")
    try:
        return TrainResult.from_json(files.read(directory / RESULT))
    except DamagedDocument as error:
        raise Incomplete(f"{directory / RESULT} is damaged: {error}") from None


def verify_checkpoint(directory: Path) -> TrainResult:
    """The result, after every file it names was found with its size and checksum; Incomplete otherwise."""
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
    """A staging directory of `iteration` whose result is there, of the newest epoch; None without one."""
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
