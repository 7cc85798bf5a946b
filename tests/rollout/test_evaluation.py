"""pass@k against the counting of all choices, and what an evaluation counts."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluation import evaluate, pass_at_k, standard_error
from rollout.trajectory import Group, Sample


def group(slot: int, *rewards: float | None, given_up: str | None = None) -> Group:
    empty = np.zeros(0)
    samples = [
        Sample(
            empty.astype(np.int32),
            empty.astype(np.uint8),
            empty.astype(np.float32),
            finish_reason="stop",
            text="",
            reward=reward,
        )
        for reward in rewards
    ]
    return Group(slot, str(slot), "p", samples, given_up=given_up)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_solution(n: int) -> None:
    for c in range(n + 1):
        solved = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            choices = list(combinations(solved, k))
            expected = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k([(n, c)], k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 400), st.data())
def test_pass_at_k_agrees_with_exact_binomials(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - comb(n - c, k) / comb(n, k)  # integers: exact until the division
    assert pass_at_k([(n, c)], k) == pytest.approx(exact, abs=1e-9)


def test_pass_at_k_is_the_mean_over_tasks_however_many_samples_each_has() -> None:
    assert pass_at_k([(4, 1), (2, 2), (1, 0)], 1) == pytest.approx((0.25 + 1 + 0) / 3)


@pytest.mark.parametrize(
    ("tasks", "k"), [([], 1), ([(2, 1)], 0), ([(2, 1)], 3), ([(2, 3)], 1), ([(2, -1)], 1)]
)
def test_pass_at_k_that_nothing_can_tell_is_an_error(tasks: list[tuple[int, int]], k: int) -> None:
    with pytest.raises(ValueError, match="every task needs n >= k samples"):
        pass_at_k(tasks, k)


def test_evaluation_gives_mean_reward_and_pass_at_one_and_n() -> None:
    said = evaluate([group(0, 1, 0, 0, 0), group(1, 0, 0, 0, 0), group(2, 1, 1, 1, 0.5)], success=1.0)
    assert said == {
        "reward": pytest.approx(4.5 / 12),
        "error": pytest.approx(0.2602, abs=1e-4),
        "pass_at": {"1": pytest.approx((0.25 + 0 + 0.75) / 3), "4": pytest.approx(2 / 3)},
        "short": 0,
    }


def test_success_is_what_reaches_the_threshold() -> None:
    assert evaluate([group(0, 0.5), group(1, 0.4)], success=0.5)["pass_at"] == {"1": 0.5}


def test_what_is_given_up_or_lost_is_left_out_and_not_failed() -> None:
    groups = [
        group(0, 1, 0),
        group(1, 1, None),  # its second sample's reward raised
        group(2, 0, 0, given_up="TimeoutError: too long"),
        group(3, None, None),
        group(4, given_up="TimeoutError: too long"),
    ]
    said = evaluate(groups, success=1.0)
    assert said.pop("error") == pytest.approx(2 / 9)
    assert said == {"reward": pytest.approx(2 / 3), "pass_at": {"1": 0.75, "2": 1.0}, "short": 1}


def test_evaluation_of_nothing_has_no_figures() -> None:
    said = evaluate([group(0, given_up="x")], success=1.0)
    assert said == {"reward": None, "error": None, "pass_at": {}, "short": 0}


def test_error_of_single_samples_is_the_standard_error_of_their_mean() -> None:
    rewards = [1.0, 0.0, 0.25, 1.0, 0.5]
    usual = np.std(rewards, ddof=1) / np.sqrt(len(rewards))
    assert standard_error([[reward] for reward in rewards]) == pytest.approx(usual)


def test_samples_of_one_task_do_not_count_as_independent() -> None:
    once = standard_error([[1.0], [0.0], [1.0]])
    assert standard_error([[1.0] * 8, [0.0] * 8, [1.0] * 8]) == pytest.approx(once)
    assert standard_error([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]) == 0  # no task is harder than another


def test_interval_covers_the_true_score_of_clustered_samples() -> None:
    """2,000 evaluations of 60 tasks, 4 samples each."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        chances = random.beta(0.5, 0.5, size=60)
        rewards = random.binomial(1, np.repeat(chances[:, None], 4, axis=1)).astype(float)
        error = standard_error(rewards.tolist())
        assert error is not None
        covered += abs(rewards.mean() - 0.5) <= 1.96 * error
    assert 0.93 < covered / 2000 < 0.97


def test_one_task_has_no_error() -> None:
    assert standard_error([[1.0, 0.0]]) is None and standard_error([]) is None
