"""Which tasks an iteration is made of: a function of what the iterations before have left."""

from functools import cache
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from rollout.settings import RolloutSettings
from rollout.tasks.sampling import draw
from rollout.tasks.task_set import TaskSet

LATEST_SHARE = 0.5
"""Weight of a task's latest reward in its success; older rewards fade."""


def draw_tasks(
    run_dir: RunDir, iteration: int, settings: RolloutSettings, tasks: TaskSet, count: int
) -> dict[str, Any]:
    """Choose the tasks of a new `iteration` from the run directory alone.

    Returns `tasks`, one for each slot; `drawn`, how many each stream of tasks has given; `waiting`, tasks
    that were drawn and for which there is no slot yet.
    """
    before = published.read_json(run_dir.iteration_json(iteration - 1)) or {}
    first = (iteration - 1) * settings.tasks_per_iteration
    deferred = _deferred(run_dir, iteration - 1, before)
    drawn = draw(
        tasks,
        settings,
        count,
        state=before.get("drawn", {"": first}),
        deferred=deferred,
        success=_success(run_dir, iteration) if settings.task_sampling == "curriculum" else {},
        iteration=iteration,
    )
    return {"tasks": drawn.tasks, "drawn": drawn.state, "waiting": deferred[count:]}


def _deferred(run_dir: RunDir, iteration: int, opened: dict[str, Any]) -> list[int]:
    """Return the tasks of slots that were not used (spare ones, or time was too short), then the tasks that
    have waited since.
    """
    waiting: list[int] = opened.get("waiting", [])
    manifest = published.read_manifest(run_dir, "train", iteration)
    if manifest is None:
        return waiting
    used = {slot for part in manifest["parts"] for slot in part["slots"]}
    return [task for slot, task in enumerate(opened.get("tasks", [])) if slot not in used] + waiting


def _success(run_dir: RunDir, before: int) -> dict[int, float]:
    """Return, by task, an exponential average of the rewards of iterations older than `before`."""
    success: dict[int, float] = {}
    for iteration in range(1, before):
        for task, reward in _rewards(run_dir, iteration).items():
            success[task] = success.get(task, reward) * (1 - LATEST_SHARE) + reward * LATEST_SHARE
    return success


@cache
def _rewards(run_dir: RunDir, iteration: int) -> dict[int, float]:
    """Return the mean reward by task of a finished iteration, which does not change any more."""
    opened = published.read_json(run_dir.iteration_json(iteration))
    manifest = published.read_manifest(run_dir, "train", iteration)
    if opened is None or manifest is None:
        return {}
    return {opened["tasks"][int(slot)]: reward for slot, reward in manifest.get("rewards", {}).items()}
