"""What a run has published: policies, manifests, metrics; so every start sees the same."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import shared_fs
from coordinator.phases import Phase, rows_of
from coordinator.run_dir import Kind, RunDir, parse_iteration_name, parse_staging_name
from coordinator.settings import RunSettings
from rollout.quota import Quota
from trainer.request import DamagedDocument, TrainResult

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
        return shared_fs.listing(directory)
    except FileNotFoundError:
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at `path`, or None if it is missing or torn. Lists first, for negative caches."""
    if path.name not in names(path.parent):
        return None
    try:
        document = json.loads(shared_fs.read(path))
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
    for text in shared_fs.read(run_dir.metrics).splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("iteration"), int):  # pyright: ignore
            lines.setdefault((line["iteration"], line.get("kind", "both")), line)  # pyright: ignore
    return sorted(lines.values(), key=lambda line: line["iteration"])


def trained_iterations(run_dir: RunDir, before: int) -> list[int]:
    """Iterations older than `before` whose metrics say that they were trained."""
    lines = metrics_lines(run_dir)
    return [
        line["iteration"]
        for line in lines
        if line.get("kind", "both") in {"both", "update"} and line["iteration"] < before
    ]


def kind_of_run(settings: RunSettings) -> str:
    """What a metrics line says it measured: both, rollout, update, or eval."""
    return "eval" if settings.rollout_split == "eval-only" else settings.rl_phase


def next_iteration(run_dir: RunDir, settings: RunSettings) -> int:
    """1 + the last iteration that this kind of run has finished."""
    kind = kind_of_run(settings)
    finishing = {"both": {"both", "update"}, "update": {"both", "update"}, "rollout": {"both", "rollout"}}
    counted = finishing.get(kind, {"both", "rollout", "update", "eval"})
    done = [line["iteration"] for line in metrics_lines(run_dir) if line.get("kind", "both") in counted]
    return 1 + max(done, default=0)


def resume_at(run_dir: RunDir, settings: RunSettings, iteration: int, policy: str | None = None) -> Phase:
    """The first row of `iteration` that its durable outputs do not show as done.

    An evaluation counts only if it is one of `policy` (None: of any).
    """
    rows = rows_of(settings.rl_phase, settings.rollout_split)
    if Phase.TRAINING in rows:
        if run_dir.checkpoint(iteration).name in names(run_dir.checkpoints):
            return Phase.ENGINE_RESTARTED
        if complete_staging(run_dir, iteration) is not None:
            return Phase.CHECKPOINT
        if Phase.TRAIN_ROLLOUT not in rows:
            return Phase.ENGINE_STOPPED
    if Phase.TRAIN_ROLLOUT in rows and read_manifest(run_dir, "train", iteration) is None:
        return Phase.TRAIN_PLAN
    opened = read_json(run_dir.iteration_json(iteration)) or {}
    due = opened.get("eval_slots") or settings.rollout_split == "eval-only"
    evaluation = read_manifest(run_dir, "eval", iteration)
    evaluated = not due or (evaluation is not None and policy in {None, evaluation.get("policy")})
    return Phase.ENGINE_STOPPED if evaluated else Phase.EVAL_DECISION


def read_manifest(run_dir: RunDir, kind: Kind, iteration: int) -> dict[str, Any] | None:
    """The manifest of an iteration, or None."""
    return read_json(run_dir.manifest(kind, iteration))


def quota(opened: Mapping[str, Any]) -> Quota:
    """How many groups the iteration needs that iteration.json has opened."""
    slots = len(opened["tasks"])
    return Quota(opened.get("groups", slots), slots, opened.get("replace_flat", False))


def manifest_digest(run_dir: RunDir, iteration: int) -> str:
    """sha256 of the training manifest's bytes."""
    return hashlib.sha256(shared_fs.read(run_dir.manifest("train", iteration))).hexdigest()


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
        return TrainResult.from_json(shared_fs.read(directory / RESULT))
    except DamagedDocument as error:
        raise Incomplete(f"{directory / RESULT} is damaged: {error}") from None


def verify_checkpoint(directory: Path) -> TrainResult:
    """The result, after every file it names was found with its size and checksum; Incomplete otherwise."""
    result = read_result(directory)
    found = {
        f"{prefix}{name}": facts
        for prefix, folder in (("", directory), ("trainer_state/", directory / "trainer_state"))
        if folder.name in names(folder.parent)
        for name, facts in shared_fs.checksums(folder).items()
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
