"""Batches whose tokens have the advantages of their turns."""

from collections.abc import Callable

import numpy as np
import pytest

from rollout.trajectory import Group, Turn
from tests.trainer.batch.test_batch import ABOUT
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import plan_step
from trainer.settings import TrainerSettings


def in_turns(group: Group, rewards: list[list[float]]) -> Group:
    """The group with two turns a sample, the first of the tokens 3 and 4; its rewards are their sums."""
    for sample, of_turns in zip(group.samples, rewards, strict=True):
        sample.turns = [
            Turn("assistant", "", 3, 5, "stop"),
            Turn("user", ""),
            Turn("assistant", "", 5, len(sample.token_ids), "stop"),
        ]
        sample.reward = None
        sample.reward_turns(of_turns)
    return group


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_credit_by_turn_gives_tokens_the_advantages_of_their_turns(
    discount: float, group: Callable[..., Group]
) -> None:
    played = in_turns(group(0, [None, None], np.random.default_rng(1)), [[1.0, 0.0], [0.0, 2.0]])
    settings = TrainerSettings(credit="turn", turn_discount=discount)
    batch = Batch.decode(build_batch([played], settings=settings, **ABOUT).encode())
    assert sorted(batch.rewards) == [1.0, 2.0] and sorted(batch.advantages) == [-0.5, 0.5]
    for k in range(2):
        sign = 1 if batch.rewards[k] == 1 else -1
        first = 0.5 if discount == 0 else -0.5
        mask = batch.loss_mask[batch.offsets[k] : batch.offsets[k + 1]]
        expected = np.where(np.arange(len(mask)) < 5, sign * first, -sign) * mask
        found = batch.token_advantages[batch.offsets[k] : batch.offsets[k + 1]]
        np.testing.assert_array_equal(found, expected)
        (microbatch,) = plan_step(batch, range(k, k + 1), [1.0], 0, 1000)
        np.testing.assert_array_equal(microbatch.advantages, expected[mask == 1])


def test_credit_by_state_takes_the_states_that_an_environment_names(group: Callable[..., Group]) -> None:
    played = in_turns(group(0, [None, None], np.random.default_rng(1)), [[1.0, 0.0], [0.0, 2.0]])
    for sample, states in zip(played.samples, (["a", None], ["b", "a"]), strict=True):
        sample.reward_turns([turn.reward for turn in sample.generated_turns], states)
    settings = TrainerSettings(credit="state", state_weight=4.0)
    batch = build_batch([played], settings=settings, **ABOUT)
    # in state a the returns are 1 and 2; the samples' own are -0.5 and 0.5
    by_reward = {1.0: (-2.5, -0.5), 2.0: (0.5, 2.5)}
    for reward, begin, end in zip(batch.rewards, batch.offsets[:-1], batch.offsets[1:], strict=True):
        first, second = by_reward[float(reward)]
        expected = np.where(np.arange(end - begin) < 5, first, second) * batch.loss_mask[begin:end]
        np.testing.assert_array_equal(batch.token_advantages[begin:end], expected)
    with pytest.raises(ValueError, match="1 states for 2 generated turns: give one for each"):
        played.samples[0].reward_turns([1.0, 0.0], ["a"])


def test_group_of_equal_rewards_teaches_by_turn_where_its_turns_differ(group: Callable[..., Group]) -> None:
    played = in_turns(group(0, [None, None], np.random.default_rng(1)), [[1.0, 0.0], [0.0, 1.0]])
    assert len(build_batch([played], **ABOUT)) == 0
    batch = build_batch([played], settings=TrainerSettings(credit="turn"), **ABOUT)
    assert len(batch) == 2 and not batch.advantages.any() and batch.teaches(range(2))


def test_samples_without_turns_are_credited_as_a_whole(groups: list[Group]) -> None:
    """Parts of before name no rewards of turns, and a single turn is stored as none."""
    by_sample = build_batch(groups, **ABOUT)
    by_turn = build_batch(groups, settings=TrainerSettings(credit="turn", turn_discount=0.5), **ABOUT)
    of_tokens = np.repeat(by_sample.advantages, by_sample.lengths()) * by_sample.loss_mask
    np.testing.assert_array_equal(by_turn.token_advantages, of_tokens)
    assert b"token_advantages" not in by_sample.encode()  # its bytes are those of before


def test_whitening_is_over_the_tokens_of_all_turns(group: Callable[..., Group]) -> None:
    played = in_turns(group(0, [None, None], np.random.default_rng(1)), [[1.0, 0.0], [0.0, 2.0]])
    batch = build_batch([played], settings=TrainerSettings(algorithm="reinforce++", credit="turn"), **ABOUT)
    values = batch.token_advantages[batch.loss_mask == 1]
    assert values.mean() == pytest.approx(0, abs=1e-6) and values.std() == pytest.approx(1)


def test_turn_that_is_left_out_is_not_trained(group: Callable[..., Group]) -> None:
    played = in_turns(group(0, [None, None], np.random.default_rng(2)), [[1.0, 0.0], [0.0, 2.0]])
    for sample in played.samples:
        sample.leave_out([0])
        with pytest.raises(ValueError, match="there is no turn 2 to leave out: 2 are generated, from 0"):
            sample.leave_out([2])
        with pytest.raises(ValueError, match="1 rewards for 2 generated turns: give one for each, or None"):
            sample.reward_turns([1.0])
    batch = build_batch([played], settings=TrainerSettings(credit="turn"), **ABOUT)
    for k in range(2):
        assert batch.loss_mask[batch.offsets[k] : batch.offsets[k + 1]].tolist()[:6] == [0] * 5 + [1]
