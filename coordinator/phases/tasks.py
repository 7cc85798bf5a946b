"""Draw the tasks of an iteration: a function of what the iterations before have left."""

from collections.abc import Iterator, Sequence
from typing import Any

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import RunDir
from rollout.settings import RolloutSettings
from rollout.tasks.sampling import draw
from rollout.tasks.task_set import TaskSet

LATEST_SHARE = 0.5
"""Weight of a task's latest reward in its success; older rewards fade."""


def draw_tasks(
    run_dir: RunDir,
    iteration: int,
    settings: RolloutSettings,
    tasks: TaskSet,
    count: int,
    again: Sequence[int] = (),
) -> dict[str, Any]:
    """Choose `count` tasks of a new `iteration` from the run directory alone; those of `again` come first.

    Returns `tasks`, one for each slot; `drawn`, how many each stream of tasks has given; `waiting`, tasks
    that were drawn and for which there is no slot yet; in a curriculum `success`, the average reward by task.
    """
    before = published.read_json(run_dir.iteration_json(iteration - 1)) or {}
    first = (iteration - 1) * settings.tasks_per_iteration
    success = _success(run_dir, iteration) if settings.task_sampling == "curriculum" else None
    drawn = draw(
        tasks,
        settings,
        count,
        state=before.get("drawn", {"": first}),
        again=again,
        deferred=_deferred(run_dir, iteration - 1, before),
        success=success or {},
        iteration=iteration,
    )
    entry = {} if success is None else {"success": {str(task): mean for task, mean in success.items()}}
    return {"tasks": drawn.tasks, "drawn": drawn.state, "waiting": drawn.waiting, **entry}


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


def _success(run_dir: RunDir, iteration: int) -> dict[int, float]:
    """Return, by task, an exponential average of the rewards of iterations older than `iteration`.

    An iteration.json of a curriculum has it, so only the rewards since then are read.
    """
    since: list[int] = []
    success: dict[int, float] = {}
    for older in _older(run_dir, iteration):
        since.append(older)
        opened = published.read_json(run_dir.iteration_json(older)) or {}
        if "success" in opened:
            success = {int(task): mean for task, mean in opened["success"].items()}
            break
    for older in reversed(since):
        for task, reward in _rewards(run_dir, older).items():
            success[task] = success.get(task, reward) * (1 - LATEST_SHARE) + reward * LATEST_SHARE
    return success


def _older(run_dir: RunDir, iteration: int) -> Iterator[int]:
    """Yield the iterations before `iteration`, newest first. The one before is enough where the average is in
    it; only for older ones is the directory listed.
    """
    if iteration == 1:
        return
    yield iteration - 1
    numbers = map(parse_iteration_name, published.names(run_dir.trajectories("train", 0).parent))
    yield from sorted((n for n in numbers if n is not None and n < iteration - 1), reverse=True)


def _rewards(run_dir: RunDir, iteration: int) -> dict[int, float]:
    """Return the mean reward by task of a finished iteration."""
    opened = published.read_json(run_dir.iteration_json(iteration))
    manifest = published.read_manifest(run_dir, "train", iteration)
    if opened is None or manifest is None:
        return {}
    return {opened["tasks"][int(slot)]: reward for slot, reward in manifest.get("rewards", {}).items()}
