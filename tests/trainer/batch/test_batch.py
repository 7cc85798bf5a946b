import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout.trajectory import Group
from trainer.batch.batch import _DTYPES, Batch, DamagedBatch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.settings import TrainerSettings

ABOUT = {"manifest_sha256": "m", "policy": "p", "temperature": 0.7, "seed": 3}


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
    sampled = [ReplayedGroups(of_iteration, max_tokens=20) for of_iteration in older or []]
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


def test_sample_without_one_of_the_rewards_that_are_decoupled_is_named(group: Callable[..., Group]) -> None:
    made = group(0, [1.0, 0.0], np.random.default_rng(0))
    made.samples[0].metrics["exact"] = 1.0
    with pytest.raises(ValueError, match="of task task-0 has no exact among its metrics"):
        build_batch(
            [made], settings=TrainerSettings(algorithm="gdpo"), reward_weights={"exact": 1.0}, **ABOUT
        )
