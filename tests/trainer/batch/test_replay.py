"""Batches that older iterations are replayed in, and the age of their tokens."""

import hashlib
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from rollout.trajectory import Group, Span
from tests.trainer.batch.test_batch import ABOUT, build, of_length
from trainer.batch.batch import Batch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.settings import TrainerSettings


def window(group: Callable[..., Group], groups: int = 40) -> list[list[Group]]:
    """Three iterations, oldest first; a sample's reward says whose it is."""
    rng = np.random.default_rng(0)
    return [[group(slot, [float(p), -1.0], rng) for slot in range(groups)] for p in range(3)]


def drawn_from(batch: Batch) -> list[int]:
    """How many of the batch's groups are of each iteration of `window`."""
    return [int((batch.rewards == p).sum()) for p in range(3)]


def test_replay_draws_as_many_groups_as_the_iteration_has_and_says_so(group: Callable[..., Group]) -> None:
    *older, own = window(group)
    own[0] = group(0, [2.0, 2.0], np.random.default_rng(0))  # flat
    batch = build(own, older)
    assert sum(drawn_from(batch)) == 39 == batch.counts.groups_used
    assert min(drawn_from(batch)) > 0
    assert batch.counts.samples_replayed == 2 * sum(drawn_from(batch)[:2])
    assert (batch.counts.samples_used, batch.counts.samples, batch.counts.groups) == (78, 80, 40)
    assert batch.counts.reward == build(own).counts.reward


def test_replay_draws_no_group_twice_and_whole_groups_alone(group: Callable[..., Group]) -> None:
    *older, own = window(group, 5)
    batch = build(own, older, replay_power=0)
    sequences = {batch.token_ids[a:b].tobytes() for a, b in pairwise(batch.offsets.tolist())}
    assert len(sequences) == len(batch) == 10
    assert np.abs(batch.advantages.sum()) < 1e-5


def test_replay_follows_the_weights_of_recency(group: Callable[..., Group]) -> None:
    *older, own = window(group)

    def shares(power: float) -> np.ndarray:
        drawn = [
            drawn_from(
                build_batch(
                    own,
                    settings=TrainerSettings(replay_power=power),
                    older=[ReplayedGroups(groups) for groups in older],
                    **{**ABOUT, "seed": seed},
                )
            )
            for seed in range(40)
        ]
        return np.sum(drawn, axis=0) / np.sum(drawn)

    assert shares(0) == pytest.approx([1 / 3, 1 / 3, 1 / 3], abs=0.05)
    # 1 : 2 : 3 for the first one drawn; after that the newer iterations have fewer left.
    assert shares(1) == pytest.approx([0.19, 0.34, 0.47], abs=0.05)
    assert shares(60)[2] == 1.0


def test_replayed_batch_is_a_function_of_groups_and_seed(group: Callable[..., Group]) -> None:
    *older, own = window(group)
    digest = hashlib.sha256(build(own, older).encode()).hexdigest()
    mixed = [random.Random(1).sample(groups, len(groups)) for groups in [*older, own]]
    again = build(mixed[2], mixed[:2])
    assert hashlib.sha256(again.encode()).hexdigest() == digest
    sampled = [ReplayedGroups(groups) for groups in older]
    assert build_batch(own, older=sampled, **{**ABOUT, "seed": 4}).slots.tolist() != again.slots.tolist()


def test_each_sequence_keeps_the_temperature_and_the_age_of_its_iteration(
    group: Callable[..., Group],
) -> None:
    *older, own = window(group)
    sampled = [ReplayedGroups(groups, 0.5 + p / 4, policy_iteration=p) for p, groups in enumerate(older)]
    about = {**ABOUT, "temperature": 1.5, "iteration": 3, "policy_iteration": 2}
    batch = Batch.decode(build_batch(own, older=sampled, **about).encode())
    temperatures = np.repeat(batch.temperatures, batch.lengths())[batch.loss_mask == 1]
    ages = batch.ages[batch.loss_mask == 1]
    assert set(zip(temperatures.tolist(), ages.tolist(), strict=True)) == {(1.5, 0), (0.75, 1), (0.5, 2)}
    for temperature, p in ((0.5, 0.0), (0.75, 1.0), (1.5, 2.0)):  # a winner's reward says whose it is
        assert set(batch.temperatures[batch.rewards == p].tolist()) == {temperature}


def test_penalty_for_length_knows_how_long_a_replayed_completion_could_be(
    group: Callable[..., Group],
) -> None:
    settings = TrainerSettings(overlong="penalise", overlong_buffer=0.2, replay_power=0)
    made = [of_length(group(slot, [1.0, 1.0], np.random.default_rng(0)), 20, 4) for slot in range(2)]
    older = [ReplayedGroups(made, max_tokens=4000)]  # nothing of these is long there
    batch = build_batch([], settings=settings, max_tokens=20, older=older, **ABOUT)
    assert len(batch) == 0
    own = [of_length(group(0, [1.0, 1.0], np.random.default_rng(0)), 20, 4)]
    batch = build_batch(own, settings=settings, max_tokens=20, older=older, **ABOUT)
    assert len(batch) == 2 and sorted(batch.advantages.tolist()) == [-0.5, 0.5]


def test_age_is_over_the_trained_tokens(group: Callable[..., Group]) -> None:
    made = of_length(group(0, [1.0, 0.0], np.random.default_rng(0)), 3, 9)
    batch = build_batch([made], iteration=6, policy_iteration=1, **ABOUT)
    assert batch.age() == {"age": 4.0, "age_max": 4.0}
    assert not batch.ages[batch.loss_mask == 0].any()
    assert build_batch([], **ABOUT).age() == {"age": 0.0, "age_max": 0.0}


def spanned(made: Group) -> Group:
    """The same group: three tokens of a sample are by the policy of iteration 1, the others by that of 3."""
    for sample in made.samples:
        begin, end = int(sample.loss_mask.argmax()), len(sample.token_ids)
        sample.spans = [Span(begin, begin + 3, 2, 1), Span(begin + 3, end, 4, 3)]
    return made


def test_age_of_a_token_counts_from_its_span(group: Callable[..., Group]) -> None:
    made = spanned(of_length(group(0, [1.0, 0.0], np.random.default_rng(0)), 9, 9))
    batch = build_batch([made], iteration=5, policy_iteration=3, **ABOUT)
    assert batch.ages[batch.loss_mask == 1].tolist() == 2 * [3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert batch.age() == pytest.approx({"age": 5 / 3, "age_max": 3.0})


def test_spans_that_are_too_old_are_not_trained_on_and_count_for_the_reward(
    group: Callable[..., Group],
) -> None:
    made = spanned(of_length(group(0, [1.0, 0.0], np.random.default_rng(0)), 9, 7))
    settings = {
        limit: TrainerSettings(max_off_policy_steps=limit, overlong="penalise", overlong_buffer=0.5)
        for limit in (0, 1, 3)
    }
    about = {**ABOUT, "iteration": 5, "policy_iteration": 3, "max_tokens": 12}
    trained = {limit: build_batch([made], settings=one, **about) for limit, one in settings.items()}
    assert len(trained[0]) == 0
    assert [int(trained[limit].loss_mask.sum()) for limit in (1, 3)] == [10, 16]
    assert trained[1].age() == {"age": 1.0, "age_max": 1.0}
    assert not trained[1].logprobs[trained[1].loss_mask == 0].any()
    # The whole sample was generated, so all of it is in its penalty for length, and in its context.
    assert trained[1].token_ids.tolist() == trained[3].token_ids.tolist()
    penalised = pytest.approx([-1 / 3, 1 / 3])
    assert sorted(trained[1].advantages.tolist()) == sorted(trained[3].advantages.tolist()) == penalised
