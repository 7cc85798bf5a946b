import hashlib
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollout.trajectory import Group, Span, Turn
from trainer.batch.batch import _DTYPES, Batch, DamagedBatch
from trainer.batch.building import Older, build_batch
from trainer.batch.packing import plan_step
from trainer.settings import TrainerSettings

ABOUT = {"manifest_sha256": "m", "policy": "p", "temperature": 0.7, "seed": 3}


@pytest.fixture
def groups(group: Callable[..., Group]) -> list[Group]:
    rng = np.random.default_rng(0)
    return [
        group(0, [1.0, 0.0, 1.0], rng),
        group(1, [1.0, 1.0, 1.0], rng),
        group(2, [1.0, None, 0.0], rng),
        Group(3, "task-3", "1+1=", [], given_up="timeout"),
        group(4, [None, 1.0], rng),
    ]


def test_batch_keeps_only_groups_with_a_lesson_and_counts_what_exists(groups: list[Group]) -> None:
    batch = build_batch(groups, **ABOUT)
    assert len(batch) == 5
    assert sorted(batch.slots) == [0, 0, 0, 2, 2]
    counts = batch.counts
    assert (counts.groups, counts.groups_used, counts.samples, counts.samples_used) == (5, 2, 9, 5)
    assert counts.samples_replayed == 0
    assert counts.reward == pytest.approx((2 + 3 + 1 + 1) / 9)
    existing = [s for group in groups for s in group.samples if s.reward is not None]
    assert counts.truncated == pytest.approx(np.mean([s.finish_reason == "length" for s in existing]))


def test_missing_sample_is_no_zero_in_the_group_mean(groups: list[Group]) -> None:
    batch = build_batch(groups, **ABOUT)
    of_slot_2 = batch.slots == 2
    np.testing.assert_allclose(sorted(batch.advantages[of_slot_2]), [-0.5, 0.5])
    np.testing.assert_allclose(sorted(batch.rewards[of_slot_2]), [0.0, 1.0])


def test_sequences_keep_their_tokens_logprobs_and_advantages(groups: list[Group]) -> None:
    batch = build_batch(groups, **ABOUT)
    expected = {}
    for group, mean in ((groups[0], 2 / 3), (groups[2], 1 / 2)):
        for sample in group.samples:
            if sample.reward is not None:
                expected[sample.token_ids.tobytes()] = sample, sample.reward - mean
    for k in range(len(batch)):
        span = slice(batch.offsets[k], batch.offsets[k + 1])
        sample, advantage = expected.pop(batch.token_ids[span].tobytes())
        np.testing.assert_array_equal(batch.loss_mask[span], sample.loss_mask)
        np.testing.assert_array_equal(batch.logprobs[span], sample.logprobs)
        assert batch.advantages[k] == pytest.approx(advantage)
        assert batch.rewards[k] == sample.reward
    assert not expected


def test_same_groups_in_any_order_make_the_same_bytes(groups: list[Group]) -> None:
    data = build_batch(groups, **ABOUT).encode()
    for seed in range(5):
        assert build_batch(random.Random(seed).sample(groups, 5), **ABOUT).encode() == data


def test_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "import hashlib; from trainer.batch.building import build_batch;"
        f"print(hashlib.sha256(build_batch([], **{ABOUT}).encode()).hexdigest())"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in "123"
    }
    assert len(seen) == 1


def test_seed_decides_the_order_and_mixes_groups(batch: Batch, group: Callable[..., Group]) -> None:
    rng = np.random.default_rng(0)
    groups = [group(slot, [0.0, 1.0, 0.0, 1.0], rng) for slot in range(12)]
    one = build_batch(groups, **ABOUT)
    other = build_batch(groups, **{**ABOUT, "seed": 4})
    assert sorted(one.slots) == sorted(other.slots)
    assert one.slots.tolist() != other.slots.tolist()
    assert len(set(one.slots[:16].tolist())) > 6


def test_two_groups_of_one_slot_are_refused(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="slot 0 has two groups"):
        build_batch([*groups, groups[0]], **ABOUT)


def test_batch_survives_a_round_trip(groups: list[Group]) -> None:
    batch = build_batch(groups, **ABOUT)
    read = Batch.decode(batch.encode())
    assert len(_DTYPES) == 16
    for name in _DTYPES:
        one, other = getattr(read, name), getattr(batch, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (read.counts, read.manifest_sha256, read.policy, read.seed) == (batch.counts, "m", "p", 3)


def test_batch_without_a_lesson_is_legal() -> None:
    batch = Batch.decode(build_batch([], **ABOUT).encode())
    assert len(batch) == 0
    assert batch.counts.reward == 0


def test_cut_batch_is_damaged(batch: Batch) -> None:
    data = batch.encode()
    for size in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(DamagedBatch):
            Batch.decode(data[:size])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offsets", [0, 2]),
        ("offsets", [0, 3, 3]),
        ("advantages", [1.0, 2.0, 3.0]),
        ("loss_mask", [1, 1, 0, 1]),
        ("logprobs", [0.0]),
        ("logprobs", [0.0, 0.0, 0.0, -np.inf] * 9),
        ("absent_at", [0]),
        ("groups", [0, 0, 0]),
        ("temperatures", [1.0]),
        ("temperatures", [1.0, 0.0]),
        ("temperatures", [1.0, float("nan")]),
        ("ages", [0, 0, 0]),
    ],
)
def test_batch_whose_arrays_contradict_each_other_is_damaged(
    group: Callable[..., Group], name: str, value: list[float]
) -> None:
    batch = build_batch([group(0, [0.0, 1.0], np.random.default_rng(0))], **ABOUT)
    object.__setattr__(batch, name, np.array(value, getattr(batch, name).dtype))
    with pytest.raises(DamagedBatch):
        Batch.decode(batch.encode())


def test_batch_of_another_format_is_named_so(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    data = batch.encode()
    monkeypatch.setattr("trainer.batch.batch.FORMAT", 6)
    with pytest.raises(DamagedBatch, match="has format 5, this version reads 6"):
        Batch.decode(data)


# ---- selection


def build(groups: list[Group], older: list[list[Group]] | None = None, **settings: Any) -> Batch:
    chosen = TrainerSettings.model_validate(settings)
    sampled = [Older(of_iteration, max_tokens=20) for of_iteration in older or []]
    return build_batch(groups, settings=chosen, max_tokens=20, older=sampled, **ABOUT)


def by_slot(batch: Batch) -> dict[int, list[float]]:
    """The advantages of each slot's sequences, in order."""
    slots = sorted(set(batch.slots.tolist()))
    return {slot: sorted(batch.advantages[batch.slots == slot].tolist()) for slot in slots}


def test_flat_groups_and_groups_of_one_are_computed_where_kl_teaches_there(groups: list[Group]) -> None:
    batch = build(groups, keep_flat_groups=True, kl="k3")
    assert len(batch.absent_at) == 0
    assert by_slot(batch) == {
        0: pytest.approx([-2 / 3, 1 / 3, 1 / 3]),
        1: [0, 0, 0],
        2: [-0.5, 0.5],
        4: [0],
    }
    assert batch.counts.groups_used == 4


def test_flat_groups_that_only_count_keep_their_places_and_tokens(groups: list[Group]) -> None:
    computed = build(groups, keep_flat_groups=True, kl="k3")
    counted = build(groups, keep_flat_groups=True)
    assert by_slot(counted) == {0: pytest.approx([-2 / 3, 1 / 3, 1 / 3]), 2: [-0.5, 0.5]}
    assert (counted.counts.groups_used, counted.counts.samples_used) == (2, 5)
    places = [place for place, slot in enumerate(computed.slots.tolist()) if slot in {1, 4}]
    assert counted.absent_at.tolist() == places and len(places) == 4
    trained = np.add.reduceat(computed.loss_mask, computed.offsets[:-1], dtype=np.int64)
    assert counted.absent_tokens.tolist() == trained[places].tolist()
    assert np.delete(computed.slots, places).tolist() == counted.slots.tolist()
    read = Batch.decode(counted.encode())
    assert read.absent_at.tolist() == places and read.groups.tolist() == counted.groups.tolist()


def test_cut_samples_that_are_dropped_count_as_sequences_without_tokens(group: Callable[..., Group]) -> None:
    made = of_length(group(0, [1.0, 0.0, 0.0], np.random.default_rng(0)), 4, 5, 20)
    batch = build([made], overlong="drop", keep_flat_groups=True)
    assert (len(batch), batch.absent_tokens.tolist()) == (2, [0])


def test_demonstrations_are_refused_by_a_loss_that_needs_logprobs_of_an_engine(
    group: Callable[..., Group],
) -> None:
    made = group(0, [1.0, 0.0], np.random.default_rng(0))
    made.samples[0].logprobs[made.samples[0].loss_mask == 1] = np.nan
    assert len(build([made], algorithm="sft")) == 2
    with pytest.raises(ValueError, match=r"1 of 2 sequences are demonstrations.*clip=ppo.*algorithm=sft"):
        build([made])
    with pytest.raises(ValueError, match=r"; trainer\.engine_correction=truncated needs logprobs"):
        build([made], clip="likelihood")
    with pytest.raises(ValueError, match=r"; trainer\.engine_sequence_cap=1\.01 needs logprobs"):
        build([made], algorithm="sft", engine_sequence_cap=1.01)


def test_threshold_selects_samples_by_the_reward_as_it_was_given(group: Callable[..., Group]) -> None:
    groups = [group(0, [0.2, 0.9, 1.0], np.random.default_rng(0)), group(1, [0.1], np.random.default_rng(1))]
    batch = build(groups, advantage="one", reward_threshold=0.9, overlong="penalise")
    assert sorted(batch.rewards.tolist()) == pytest.approx([0.9, 1.0])
    assert by_slot(batch) == {0: [1.0, 1.0]}
    assert (batch.counts.groups_used, batch.counts.samples_used, batch.counts.samples) == (1, 2, 4)


def of_length(group: Group, *generated: int) -> Group:
    """The group, its samples with so many trained tokens."""
    for sample, tokens in zip(group.samples, generated, strict=True):
        sample.token_ids = np.arange(tokens + 3, dtype=np.int32)
        sample.loss_mask = np.array([0] * 3 + [1] * tokens, np.uint8)
        sample.logprobs = np.array([0] * 3 + [-1] * tokens, np.float32)
        sample.finish_reason = "length" if tokens == 20 else "stop"
    return group


def test_overlong_samples_lose_reward_over_the_last_tokens(group: Callable[..., Group]) -> None:
    made = of_length(group(0, [1.0, 1.0, 1.0, 1.0], np.random.default_rng(0)), 16, 17, 19, 20)
    batch = build([made], overlong="penalise", overlong_buffer=0.2)  # 4 tokens of 20
    shaped = np.array([1.0, 0.75, 0.25, 0.0])
    assert by_slot(batch)[0] == pytest.approx(sorted(shaped - shaped.mean()))
    assert batch.rewards.tolist() == [1.0] * 4 and batch.counts.reward == 1.0


def test_penalty_without_the_longest_completion_is_an_error(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match=r"rollout\.max_tokens"):
        build_batch(groups, settings=TrainerSettings(overlong="penalise"), **ABOUT)


def test_cut_samples_are_dropped_but_stay_in_the_mean_of_their_group(group: Callable[..., Group]) -> None:
    made = of_length(group(0, [1.0, 0.0, 0.0], np.random.default_rng(0)), 4, 5, 20)
    assert by_slot(build([made], overlong="drop")) == {0: pytest.approx([-1 / 3, 2 / 3])}


def test_whitening_is_over_the_tokens_that_are_trained_on(group: Callable[..., Group]) -> None:
    rng = np.random.default_rng(0)
    cut = of_length(group(0, [1.0, 0.0, 0.0], rng), 4, 5, 20)
    other = of_length(group(1, [3.0, 0.0], rng), 6, 7)
    batch = build([cut, other], advantage="whitened", overlong="drop")
    values = np.array([2 / 3, -1 / 3, 1.5, -1.5])
    tokens = np.repeat(values, [4, 5, 6, 7])
    assert sorted(batch.advantages.tolist()) == pytest.approx(
        sorted((values - tokens.mean()) / tokens.std()), rel=1e-5
    )


def test_whitening_counts_flat_groups_and_gives_them_an_advantage(group: Callable[..., Group]) -> None:
    rng = np.random.default_rng(0)
    flat, other = of_length(group(0, [1.0, 1.0], rng), 10, 12), of_length(group(1, [3.0, 0.0], rng), 6, 7)
    batch = build([flat, other], algorithm="reinforce++")
    tokens = np.repeat([0.0, 0.0, 1.5, -1.5], [10, 12, 6, 7])
    expected = (np.array([0.0, 0.0, 1.5, -1.5]) - tokens.mean()) / tokens.std()
    assert sorted(batch.advantages.tolist()) == pytest.approx(sorted(expected), rel=1e-5)


def test_sample_without_a_trained_token_is_left_out(group: Callable[..., Group]) -> None:
    made = of_length(group(0, [1.0, 0.0], np.random.default_rng(0)), 4, 0)
    assert by_slot(build([made])) == {0: [0.5]}


# ---- replay


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
                    older=[Older(groups) for groups in older],
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
    sampled = [Older(groups) for groups in older]
    assert build_batch(own, older=sampled, **{**ABOUT, "seed": 4}).slots.tolist() != again.slots.tolist()


def test_each_sequence_keeps_the_temperature_and_the_age_of_its_iteration(
    group: Callable[..., Group],
) -> None:
    *older, own = window(group)
    sampled = [Older(groups, 0.5 + p / 4, policy_iteration=p) for p, groups in enumerate(older)]
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
    older = [Older(made, max_tokens=4000)]  # nothing of these is long there
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


def test_sample_without_one_of_the_rewards_that_are_decoupled_is_named(group: Callable[..., Group]) -> None:
    made = group(0, [1.0, 0.0], np.random.default_rng(0))
    made.samples[0].metrics["exact"] = 1.0
    with pytest.raises(ValueError, match="of task task-0 has no exact among its metrics"):
        build_batch(
            [made], settings=TrainerSettings(algorithm="gdpo"), reward_weights={"exact": 1.0}, **ABOUT
        )


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
