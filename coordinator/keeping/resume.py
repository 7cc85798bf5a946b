"""Find where a run goes on, from what is published: the next iteration, and its first phase not done."""

from collections.abc import Mapping
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.protocol.phase import Phase, phases_of
from coordinator.settings.tree import RunSettings
from rollout.quota import Quota

TRAINS = ("both", "update")
"""The kinds of run that train."""


def trained_iterations(run_dir: RunDir, before: int) -> list[int]:
    """Return the iterations older than `before` whose metrics say that they were trained."""
    lines = published.metrics_lines(run_dir)
    return [line["iteration"] for line in lines if line["kind"] in TRAINS and line["iteration"] < before]


def next_iteration(finished: FinishedIterations, settings: RunSettings) -> int:
    """Return 1 + the last iteration that this kind of run has finished."""
    finishing = {"both": TRAINS, "update": TRAINS, "rollout": ("both", "rollout")}
    counted = finishing.get(settings.kind, ("both", "rollout", "update", "eval"))
    return 1 + finished.look().last(*counted)


def resume_at(run_dir: RunDir, settings: RunSettings, iteration: int, policy: str | None = None) -> Phase:
    """Return the first phase of `iteration` that its durable outputs do not show as done.

    An evaluation counts only if it is one of `policy` (None: of any).
    """
    phases = phases_of(settings.kind)
    if Phase.TRAINING in phases:
        if run_dir.checkpoint(iteration).name in published.names(run_dir.checkpoints):
            return Phase.ENGINE_RESTARTED
        if published.complete_staging(run_dir, iteration) is not None:
            return Phase.CHECKPOINT
        if Phase.TRAIN_ROLLOUT not in phases:
            return Phase.ENGINE_STOPPED
    if Phase.TRAIN_ROLLOUT in phases and published.read_manifest(run_dir, "train", iteration) is None:
        return Phase.TRAIN_PLAN
    opened = published.read_json(run_dir.iteration_json(iteration)) or {}
    due = opened.get("eval_slots") or settings.rollout_split == "eval-only"
    evaluation = published.read_manifest(run_dir, "eval", iteration)
    evaluated = not due or (evaluation is not None and policy in {None, evaluation.get("policy")})
    return Phase.ENGINE_STOPPED if evaluated else Phase.EVAL_DECISION


def quota(opened: Mapping[str, Any]) -> Quota:
    """Return how many groups an iteration needs; `opened` is its iteration.json."""
    needed = opened["groups"] + len(opened.get("begun", ()))  # it goes on with all that are begun
    return Quota(needed, len(opened["tasks"]), opened["replace_flat"])
