import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from rollout.trajectory import Group
from trainer.batch import Batch, DamagedBatch, build_batch

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
        "import hashlib; from trainer.batch import build_batch;"
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
    for name in ("token_ids", "loss_mask", "logprobs", "offsets", "advantages", "rewards", "slots"):
        one, other = getattr(read, name), getattr(batch, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (read.counts, read.manifest_sha256, read.policy, read.temperature, read.seed) == (
        batch.counts,
        *ABOUT.values(),
    )


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
    monkeypatch.setattr("trainer.batch.FORMAT", 2)
    with pytest.raises(DamagedBatch, match="has format 1, this version reads 2"):
        Batch.decode(data)
