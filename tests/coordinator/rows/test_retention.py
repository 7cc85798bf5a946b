"""Which checkpoints stay."""

import pytest

from coordinator.rows.retention import kept
from coordinator.settings import CheckpointSettings

SAMPLED = [{"iteration": n, "reward": reward} for n, reward in enumerate([0.1, 0.5, 0.9, 0.2, 0.3, 0.3], 1)]


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({"keep_last": 2}, {5, 6}),
        ({"keep_last": 9}, {1, 2, 3, 4, 5, 6}),
        ({"keep_last": 2, "keep_every": 2}, {2, 4, 5, 6}),
        # Iteration 3 sampled from what iteration 2 had trained; nothing has sampled from 6 yet.
        ({"keep_last": 2, "keep_best": 1}, {2, 5, 6}),
        ({"keep_last": 2, "keep_best": 3, "keep_every": 3}, {1, 2, 3, 5, 6}),
    ],
)
def test_newest_stay_and_every_nth_and_the_best(settings: dict[str, int], stay: set[int]) -> None:
    assert kept([1, 2, 3, 4, 5, 6], SAMPLED, CheckpointSettings(**settings)) == stay


def test_best_is_the_best_evaluated_where_there_are_evaluations() -> None:
    lines = [*SAMPLED[:4], {"iteration": 5, "reward": 0.1, "eval_reward": 0.7}, SAMPLED[5]]
    assert kept([1, 2, 3, 4, 5, 6], lines, CheckpointSettings(keep_last=2, keep_best=1)) == {4, 5, 6}


def test_of_equally_good_ones_the_newer_stays() -> None:
    lines = [{"iteration": n, "reward": 0.5} for n in (2, 3, 4)]
    assert kept([1, 2, 3, 4, 5], lines, CheckpointSettings(keep_last=2, keep_best=1)) == {3, 4, 5}
