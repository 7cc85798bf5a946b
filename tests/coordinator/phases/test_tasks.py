"""The tasks of an iteration follow from the run directory; a curriculum from the rewards of all before."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.phases.tasks import LATEST_SHARE, draw_tasks
from rollout.settings import RolloutSettings
from rollout.tasks.task_set import load_tasks
from tests.coordinator.examples import write_json

CURRICULUM = RolloutSettings(task_sampling="curriculum", tasks_per_iteration=4)
TASKS = load_tasks("builtin:arithmetic", seed=0, split="train")


def draw(run_dir: RunDir, iteration: int, settings: RolloutSettings = CURRICULUM) -> dict[str, Any]:
    return draw_tasks(run_dir, iteration, settings, TASKS, 4)


def go_on(run_dir: RunDir, first: int, last: int, settings: RolloutSettings = CURRICULUM) -> None:
    """Iterations that are opened and finished, with rewards by chance."""
    for iteration in range(first, last + 1):
        drawn = draw(run_dir, iteration, settings)
        write_json(run_dir.iteration_json(iteration), {"iteration": iteration, **drawn})
        rewards = random.Random(iteration)
        manifest = {
            "parts": [{"slots": [0, 1, 2, 3]}],
            "rewards": {str(k): rewards.random() for k in range(4)},
        }
        write_json(run_dir.manifest("train", iteration), manifest)


def replayed(run_dir: RunDir, before: int) -> dict[str, float]:
    """What the average is, by all iterations from the first on."""
    success: dict[str, float] = {}
    for iteration in range(1, before):
        tasks = (published.read_json(run_dir.iteration_json(iteration)) or {})["tasks"]
        rewards = (published.read_manifest(run_dir, "train", iteration) or {})["rewards"]
        for slot, reward in rewards.items():
            task = str(tasks[int(slot)])
            mean: float = success.get(task, reward)  # pyright: ignore
            success[task] = mean * (1 - LATEST_SHARE) + reward * LATEST_SHARE
    return success


def test_curriculum_reads_the_iteration_before_alone(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on(run_dir, 1, 12)
    wanted, seen = replayed(run_dir, 13), set[Path]()
    read = published.names

    def listed(directory: Path) -> list[str]:
        seen.add(directory)
        return read(directory)

    monkeypatch.setattr(published, "names", listed)
    before = draw(run_dir, 13)
    assert before["success"] == wanted
    assert seen == {run_dir.trajectories("train", 12)}
    for iteration in range(1, 12):
        shutil.rmtree(run_dir.trajectories("train", iteration))
    assert draw(run_dir, 13) == before, "so older ones may be removed"


@pytest.mark.parametrize("gone", [0, 3])
def test_curriculum_that_begins_late_knows_the_iterations_that_are_there(run_dir: RunDir, gone: int) -> None:
    go_on(run_dir, 1, 8, CURRICULUM.model_copy(update={"task_sampling": "uniform"}))
    assert "success" not in draw(run_dir, 9, RolloutSettings())
    wanted = replayed(run_dir, 9)
    for iteration in range(1, gone + 1):
        shutil.rmtree(run_dir.trajectories("train", iteration))
    found = draw(run_dir, 9)["success"]
    assert found == wanted if not gone else set(found) < set(wanted)


def test_curriculum_that_was_left_for_a_while_goes_on_from_its_average(run_dir: RunDir) -> None:
    go_on(run_dir, 1, 4)
    go_on(run_dir, 5, 6, CURRICULUM.model_copy(update={"task_sampling": "uniform"}))
    go_on(run_dir, 7, 8)
    assert draw(run_dir, 9)["success"] == replayed(run_dir, 9)
