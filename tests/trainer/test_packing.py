from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import Batch
from trainer.model import Learner, build_learner
from trainer.packing import Microbatch, fill, pack_rows, plan_step, split_ranks, split_steps
from trainer.settings import TrainerSettings

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
relaxed = settings(deadline=None)  # the machine may be busy
WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@relaxed
@given(st.integers(0, 5000), st.integers(1, 600))
def test_steps_cover_the_batch_and_are_of_equal_size(sequences: int, global_batch_size: int) -> None:
    steps = split_steps(sequences, global_batch_size)
    assert [k for step in steps for k in step] == list(range(sequences))
    sizes = {len(step) for step in steps}
    assert max(sizes, default=0) <= global_batch_size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@relaxed
@given(LENGTHS, WEIGHTS)
def test_every_sequence_goes_to_exactly_one_rank_and_tokens_follow_weights(
    lengths: list[int], weights: list[float]
) -> None:
    shares = split_ranks(lengths, weights)
    assert sorted(k for share in shares for k in share) == list(range(len(lengths)))
    for share, weight in zip(shares, weights, strict=True):
        tokens = sum(lengths[k] for k in share)
        fair = sum(lengths) * weight / sum(weights)
        others = (len(weights) - 1) * weight / sum(weights)
        assert tokens <= fair + others * max(lengths, default=0) + 1e-6


@relaxed
@given(LENGTHS, st.integers(16, 512))
def test_every_sequence_lies_in_exactly_one_row_and_no_microbatch_is_too_large(
    lengths: list[int], max_tokens: int
) -> None:
    microbatches = pack_rows(lengths, max_tokens)
    assert sorted(k for rows in microbatches for row in rows for k in row) == list(range(len(lengths)))
    for rows in microbatches:
        width = max(sum(lengths[k] for k in row) for row in rows)
        assert width == max(lengths[k] for row in rows for k in row)
        assert len(rows) * width <= max_tokens or (len(rows) == 1 and len(rows[0]) == 1)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(16, 200))
def test_ranks_have_as_many_microbatches_and_together_train_every_token_once(
    batch: Batch, weights: list[float], max_tokens: int
) -> None:
    step = range(16, 48)
    plans = [plan_step(batch, step, weights, rank, max_tokens) for rank in range(len(weights))]
    assert len({len(plan) for plan in plans}) == 1
    begin, end = batch.offsets[16], batch.offsets[48]
    trained = batch.loss_mask[begin:end] == 1
    expected = sorted(
        zip(batch.token_ids[begin:end][trained], batch.logprobs[begin:end][trained], strict=True)
    )
    found = [pair for plan in plans for m in plan for pair in zip(m.targets, m.engine_logprobs, strict=True)]
    assert sorted(found) == expected


def test_rank_without_sequences_gets_empty_microbatches(batch: Batch) -> None:
    plans = [plan_step(batch, range(2), [1.0, 1.0, 1.0], rank, 64) for rank in range(3)]
    assert [[len(m.token_ids) for m in plan] for plan in plans] == [[1], [1], [0]]


def test_tokens_know_their_sequence(batch: Batch) -> None:
    microbatch = fill(batch, [[7, 2], [5]])
    lengths = [int(batch.loss_mask[batch.offsets[k] : batch.offsets[k + 1]].sum()) for k in (7, 2, 5)]
    assert np.bincount(microbatch.sequences).tolist() == lengths
    np.testing.assert_array_equal(microbatch.advantages, batch.advantages[[7, 2, 5]][microbatch.sequences])


def test_trained_token_is_scored_by_the_position_before_it(batch: Batch) -> None:
    microbatch = fill(batch, [[0, 1], [2]])
    rows = microbatch.token_ids.ravel()
    np.testing.assert_array_equal(rows[microbatch.scored_at + 1], microbatch.targets)
    assert (microbatch.position_ids.ravel()[microbatch.scored_at] >= 2).all()  # the prompt has three tokens


@pytest.fixture(scope="module")
def learner(base_dir: Path) -> Learner:
    return build_learner(base_dir, torch.device("cpu"), TrainerSettings())


def by_token(microbatch: Microbatch, values: torch.Tensor) -> dict[tuple[int, float], float]:
    """Values by (token, engine logprob), a pair that is unique in the batch."""
    keys = zip(microbatch.targets.tolist(), microbatch.engine_logprobs.tolist(), strict=True)
    return dict(zip(keys, values.tolist(), strict=True))


@torch.no_grad()
def test_packed_sequences_score_as_they_do_alone(learner: Learner, batch: Batch) -> None:
    packed = fill(batch, [[0, 1, 2], [3, 4], [5]])
    assert (packed.position_ids[0] == 0).sum() == 3
    together = by_token(packed, learner.logprobs(packed, 1.0)[0])
    for k in range(6):
        alone = fill(batch, [[k]])
        for key, value in by_token(alone, learner.logprobs(alone, 1.0)[0]).items():
            assert together.pop(key) == pytest.approx(value, abs=5e-6)
    assert not together


@torch.no_grad()
def test_sequence_does_not_see_its_neighbours(learner: Learner, batch: Batch) -> None:
    rows = [[0, 1, 2], [3]]
    before = fill(batch, rows)
    lengths = batch.lengths()
    middle = slice(int(lengths[0]), int(lengths[0] + lengths[1]))
    after = fill(batch, rows)
    after.token_ids[0, middle] = 97 - after.token_ids[0, middle]
    one, other = (learner.logprobs(m, 1.0)[0] for m in (before, after))
    row, column = np.divmod(before.scored_at, before.token_ids.shape[1])
    changed = (row == 0) & (column >= middle.start) & (column < middle.stop)
    assert (one - other)[changed].abs().max() > 0.01
    assert (one - other)[~changed].abs().max() < 5e-6


@torch.no_grad()
def test_logprobs_are_of_the_next_token_at_the_sampling_temperature(learner: Learner, batch: Batch) -> None:
    microbatch = fill(batch, [[0]])
    token_ids = torch.from_numpy(microbatch.token_ids)
    log_p = torch.log_softmax(learner.model(input_ids=token_ids).logits[0].double() / 0.7, dim=-1)
    logprobs, entropy = learner.logprobs(microbatch, 0.7)
    expected = [log_p[t - 1, token_ids[0, t]].item() for t in range(3, token_ids.shape[1])]
    assert logprobs.tolist() == pytest.approx(expected, abs=5e-6)
    assert entropy.tolist() == pytest.approx((-log_p.exp() * log_p).sum(-1)[2:-1].tolist(), abs=5e-6)


@torch.no_grad()
def test_attention_mask_would_mix_neighbours(learner: Learner, batch: Batch) -> None:
    """The trap that passing no mask avoids; if this fails, transformers has changed how it packs."""
    packed = fill(batch, [[0, 1, 2]])
    token_ids, position_ids = torch.from_numpy(packed.token_ids), torch.from_numpy(packed.position_ids)
    scored_at, targets = torch.from_numpy(packed.scored_at), torch.from_numpy(packed.targets)
    right, _ = learner.logprobs(packed, 1.0)
    mask = torch.ones_like(token_ids)
    logits = learner.model(input_ids=token_ids, position_ids=position_ids, attention_mask=mask).logits[0]
    mixed = torch.log_softmax(logits[scored_at], -1).gather(-1, targets[:, None])[:, 0]
    assert (right - mixed).abs().max() > 0.01
