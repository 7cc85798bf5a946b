import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantages import group_advantages


def test_advantage_is_reward_minus_group_mean_without_division_by_std() -> None:
    for rewards, expected in (([1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]), ([10.0, 0.0], [5.0, -5.0])):
        advantages = group_advantages(rewards)
        assert advantages is not None
        np.testing.assert_allclose(advantages, expected)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.3, 0.3, 0.3], [0.0] * 8])
def test_group_without_a_lesson_has_no_advantages(rewards: list[float]) -> None:
    assert group_advantages(rewards) is None


def test_reward_that_is_not_a_number_is_refused_with_the_values() -> None:
    with pytest.raises(ValueError, match=r"nan.*reward function"):
        group_advantages([1.0, float("nan")])


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_advantages_sum_to_zero(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    if advantages is not None:
        assert advantages.dtype == np.float32
        assert abs(float(advantages.sum(dtype=np.float64))) < 1e-2
