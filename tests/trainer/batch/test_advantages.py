import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.batch.advantages import (
    decoupled,
    group_advantages,
    standardised_batch,
    state_advantages,
    turn_advantages,
    whiten,
)

KINDS = ["centred", "standardised", "leave_one_out", "whitened", "one"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("centred", [0.75, -0.25, -0.25, -0.25]),
        ("standardised", [1.5, -0.5, -0.5, -0.5]),  # the deviation of the sample is 1/2
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("success", [3.0, -1.0, -1.0, -1.0]),
        ("whitened", [0.75, -0.25, -0.25, -0.25]),
        ("one", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_advantages_of_a_group_are_those_of_the_papers(kind: str, expected: list[float]) -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], kind) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.3, 0.3, 0.3], [0.0] * 8])
def test_group_without_a_lesson_has_no_advantages_or_zeros(rewards: list[float], kind: str) -> None:
    assert group_advantages(rewards, kind) is None
    assert group_advantages(rewards, kind, keep_flat=True) == pytest.approx([0.0] * len(rewards))


@pytest.mark.parametrize("rewards", [[1.0], [0.3, 0.3, 0.3]])
def test_any_group_is_a_lesson_where_every_sample_counts_the_same(rewards: list[float]) -> None:
    assert group_advantages(rewards, "one") == pytest.approx([1.0] * len(rewards))


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up() -> None:
    advantages = group_advantages([0.3, 0.3, 0.1 + 0.2], "standardised")
    assert advantages is not None and abs(advantages).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_reward_that_is_not_a_number_is_refused_with_the_values(kind: str) -> None:
    with pytest.raises(ValueError, match=r"nan.*reward function"):
        group_advantages([1.0, float("nan")], kind)


def test_success_needs_rewards_that_are_not_negative() -> None:
    with pytest.raises(
        ValueError, match=r"success divides .* from 0 up, got \[-1.0, 1.0\]; shift the reward"
    ):
        group_advantages([-1.0, 1.0], "success")


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=16), st.sampled_from(KINDS[:-1]))
def test_advantages_sum_to_zero_and_rank_as_the_rewards(rewards: list[int], kind: str) -> None:
    advantages = group_advantages(rewards, kind)
    if advantages is not None:
        assert abs(advantages.sum()) < 1e-6
        assert advantages.argmax() in np.flatnonzero(np.array(rewards) == max(rewards))


def test_tokens_of_a_whitened_batch_have_mean_0_and_deviation_1() -> None:
    tokens = [1, 7, 2, 3, 4]
    values = np.repeat(whiten([0.5, -0.5, 2.0, -2.0, 0.1], tokens), tokens)
    assert (values.mean(), values.std()) == pytest.approx((0.0, 1.0), abs=1e-12)
    assert whiten([], []).shape == (0,)
    assert whiten([0.25, 0.25], [3, 1]).tolist() == [0.0, 0.0]


def test_several_rewards_count_by_their_weights_whatever_they_range_over() -> None:
    rewards = [[1.0, 300.0], [0.0, 100.0], [0.0, 100.0], [1.0, 300.0]]
    wide = decoupled(rewards, [1.0, 0.5])
    narrow = decoupled([[right, length / 100] for right, length in rewards], [1.0, 0.5])
    assert wide == pytest.approx(narrow, abs=1e-5)
    assert wide == pytest.approx(np.array([1.5, -1.5, -1.5, 1.5]) * 3**0.5 / 2, abs=1e-5)


def test_sums_of_rewards_are_standardised_over_the_batch() -> None:
    assert standardised_batch([3.0, -3.0, 0.0]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)
    assert standardised_batch([]).tolist() == []


def test_turn_is_compared_by_what_comes_from_it_on() -> None:
    rewards = [[1.0, 0.0, 4.0], [0.0, 2.0, 0.0]]
    halved = turn_advantages(rewards, discount=0.5)  # returns 2, 2, 4 and 1, 2, 0
    assert [values.tolist() for values in halved] == [[0.5, 0.0, 2.0], [-0.5, 0.0, -2.0]]
    own = turn_advantages(rewards, "leave_one_out", discount=0.0)
    assert [values.tolist() for values in own] == [[1.0, -2.0, 4.0], [-1.0, 2.0, -4.0]]


@pytest.mark.parametrize("kind", ["centred", "standardised", "leave_one_out"])
def test_reward_at_the_end_alone_gives_each_turn_the_advantage_of_its_sample(kind: str) -> None:
    of_samples = group_advantages([1.0, 0.0, 0.5], kind)
    of_turns = turn_advantages([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]], kind)
    assert of_samples is not None
    np.testing.assert_allclose(of_turns, np.stack([of_samples, of_samples], axis=1))


def test_turn_that_no_other_sample_has_gets_the_advantage_of_its_sample() -> None:
    first, second = turn_advantages([[1.0], [0.0, 0.0, 3.0]])
    assert (first.tolist(), second.tolist()) == ([-1.0], [1.0, 1.0, 1.0])


def test_turn_is_compared_with_those_in_the_same_state_beside_its_sample() -> None:
    rewards, states = [[0.0, 1.0], [0.0, 0.0, 3.0]], [["a", "b"], ["a", "b", "a"]]
    # returns 0.5, 1 and 0.75, 1.5, 3: a has 0.5, 0.75 and 3, whose mean is 17/12; b has 1 and 1.5
    first, second = state_advantages([-1.0, 1.0], rewards, states, discount=0.5, weight=2.0)
    np.testing.assert_allclose(first, [-1 - 11 / 6, -1 - 0.5])
    np.testing.assert_allclose(second, [1 - 4 / 3, 1 + 0.5, 1 + 19 / 6])
    alone = state_advantages([-1.0, 1.0], rewards, [["a", None], ["b", None, "c"]])
    assert [values.tolist() for values in alone] == [[-1, -1], [1, 1, 1]]


def test_credit_by_turn_does_not_bias_the_gradient() -> None:
    """Every pair of samples of a game: the first action ends it or not, each action earns something."""
    ends, stays = 0.3, 0.6
    earned = {(1,): [0.7], (0, 0): [-0.2, 1.0], (0, 1): [-0.2, 2.0]}
    chance = {(1,): ends, (0, 0): (1 - ends) * (1 - stays), (0, 1): (1 - ends) * stays}
    scores = {(1,): [1 - ends], (0, 0): [-ends, -stays], (0, 1): [-ends, 1 - stays]}  # of the logits
    expected, found = np.zeros(2), np.zeros(2)
    for game, p in chance.items():
        expected[: len(game)] += p * sum(earned[game]) * np.array(scores[game])
        for other, q in chance.items():
            advantages, _ = turn_advantages([earned[game], earned[other]], "leave_one_out")
            found[: len(game)] += p * q * advantages * np.array(scores[game])
    np.testing.assert_allclose(found, expected)
