from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.trajectory import Group
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import (
    Bundle,
    Microbatch,
    Packing,
    bundle,
    deal,
    fill,
    pack_rows,
    plan_step,
    split_ranks,
    split_steps,
)
from trainer.model.learner import Learner, build_learner
from trainer.settings import TrainerSettings

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(st.integers(0, 5000), st.integers(1, 600))
def test_steps_cover_the_batch_and_are_of_equal_size(sequences: int, global_batch_size: int) -> None:
    steps = split_steps(sequences, global_batch_size)
    assert [k for step in steps for k in step] == list(range(sequences))
    sizes = {len(step) for step in steps}
    assert max(sizes, default=0) <= global_batch_size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


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


@given(LENGTHS, st.integers(16, 512))
def test_row_of_one_sequence_is_padded_no_more_than_its_microbatch_is_wide(
    lengths: list[int], max_tokens: int
) -> None:
    microbatches = pack_rows(lengths, max_tokens, several=False)
    assert sorted(k for rows in microbatches for (k,) in rows) == list(range(len(lengths)))
    for rows in microbatches:
        width = max(lengths[k] for (k,) in rows)
        assert len(rows) * width <= max_tokens or len(rows) == 1
    for rows, after in pairwise(microbatches):
        assert min(lengths[k] for (k,) in rows) >= lengths[after[0][0]], "rows of like lengths are together"


def test_tokens_of_a_microbatch_are_those_that_are_not_padding(batch: Batch) -> None:
    microbatch = fill(batch, [alone(batch, 0, 1), alone(batch, 2)])
    assert microbatch.tokens == batch.input_tokens[:3].sum() < microbatch.token_ids.size
    first, second = groups(batch)[:2]
    shared_row = fill(batch, [[shared(batch, first)], [shared(batch, second)]])
    assert shared_row.tokens == sum(shared(batch, one).tokens for one in (first, second))


def alone(batch: Batch, *sequences: int) -> list[Bundle]:
    """A row in which nothing is shared."""
    return [Bundle([k], int(batch.input_tokens[k])) for k in sequences]


@settings(max_examples=30)
@given(
    WEIGHTS,
    st.integers(16, 200),
    st.builds(Packing, several=st.booleans(), pairs_per_token=st.sampled_from([0.0, 30.0, 1e6])),
)
def test_ranks_have_as_many_microbatches_and_together_train_every_token_once(
    batch: Batch, weights: list[float], max_tokens: int, packing: Packing
) -> None:
    step = range(16, 48)
    plans = [plan_step(batch, step, weights, rank, max_tokens, packing) for rank in range(len(weights))]
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
    microbatch = fill(batch, [alone(batch, 7, 2), alone(batch, 5)])
    lengths = [int(batch.loss_mask[batch.offsets[k] : batch.offsets[k + 1]].sum()) for k in (7, 2, 5)]
    assert np.bincount(microbatch.sequences).tolist() == lengths
    np.testing.assert_array_equal(microbatch.advantages, batch.advantages[[7, 2, 5]][microbatch.sequences])


def test_trained_token_is_scored_by_the_position_before_it(batch: Batch) -> None:
    microbatch = fill(batch, [alone(batch, 0, 1), alone(batch, 2)])
    scoring = microbatch.token_ids.ravel()[microbatch.scored_at]
    expected = [batch.token_ids[batch.offsets[k] + 2 : batch.offsets[k + 1] - 1] for k in range(3)]
    np.testing.assert_array_equal(scoring, np.concatenate(expected))  # the prompt has three tokens


@pytest.fixture(scope="module")
def learner(base_dir: Path) -> Learner:
    return build_learner(base_dir, torch.device("cpu"), TrainerSettings())


@torch.no_grad()
def test_logprobs_are_of_the_next_token_at_the_sampling_temperature(learner: Learner, batch: Batch) -> None:
    microbatch = fill(replace(batch, temperatures=0.7 * batch.temperatures), [alone(batch, 0)])
    token_ids = torch.from_numpy(batch.token_ids[: batch.offsets[1]].astype(np.int64))[None]
    logprobs, entropy = learner.logprobs(microbatch)
    log_p = torch.log_softmax(learner.model(input_ids=token_ids).logits[0].double() / 0.7, dim=-1)
    expected = [log_p[t - 1, token_ids[0, t]].item() for t in range(3, token_ids.shape[1])]
    assert logprobs.tolist() == pytest.approx(expected, abs=5e-6)
    assert entropy.tolist() == pytest.approx((-log_p.exp() * log_p).sum(-1)[2:-1].tolist(), abs=5e-6)


@torch.no_grad()
def test_attention_mask_would_mix_neighbours(learner: Learner, batch: Batch) -> None:
    """The trap that passing no mask avoids; if this fails, transformers has changed how it packs."""
    packed = fill(batch, [alone(batch, 0, 1, 2)])
    token_ids, position_ids = torch.from_numpy(packed.token_ids), torch.from_numpy(packed.position_ids)
    scored_at, targets = torch.from_numpy(packed.scored_at), torch.from_numpy(packed.targets)
    right, _ = learner.logprobs(packed)
    mask = torch.ones_like(token_ids)
    logits = learner.model(input_ids=token_ids, position_ids=position_ids, attention_mask=mask).logits[0]
    mixed = torch.log_softmax(logits[scored_at], -1).gather(-1, targets[:, None])[:, 0]
    assert (right - mixed).abs().max() > 0.01


def groups(batch: Batch) -> list[list[int]]:
    """The batch's sequences by prompt."""
    return [np.flatnonzero(batch.slots == slot).tolist() for slot in np.unique(batch.slots)]


def shared(batch: Batch, sequences: list[int]) -> Bundle:
    """One bundle of them all."""
    prompt = int(batch.prompt_tokens[sequences[0]])
    tokens = int(batch.input_tokens[sequences].sum()) - (len(sequences) - 1) * prompt
    return Bundle(sequences, tokens, prompt)


@given(st.floats(0, 5000), st.integers(1, 300))
def test_every_sequence_is_in_one_bundle_of_its_own_prompt(
    batch: Batch, pairs_per_token: float, max_tokens: int
) -> None:
    bundles = bundle(batch, range(8, 40), pairs_per_token, max_tokens)
    assert sorted(k for one in bundles for k in one.sequences) == list(range(8, 40))
    for one in bundles:
        assert len(one.sequences) == 1 or one == shared(batch, one.sequences)
        assert len({int(batch.slots[k]) for k in one.sequences}) == 1
        assert len(one.sequences) == 1 or one.tokens <= max_tokens


def test_prompt_is_shared_where_it_is_cheaper(batch: Batch) -> None:
    step = range(len(batch))
    whole = [len(group) for group in groups(batch)]

    def sizes(pairs_per_token: float, max_tokens: float = 1e9) -> list[int]:
        return sorted(len(one.sequences) for one in bundle(batch, step, pairs_per_token, max_tokens))

    assert sizes(1e6) == sorted(whole)  # a wide model: attention costs next to nothing
    assert sizes(1.0) == [1] * len(batch)  # attention is all
    assert sizes(1e6, max_tokens=0) == sizes(0.0) == [1] * len(batch)
    assert 1 < max(sizes(100.0)) < max(whole)


@pytest.mark.parametrize("weights", [[2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.05], [1.0] * 16])
def test_sharing_leaves_no_rank_behind(group: Callable[..., Group], weights: list[float]) -> None:
    rng = np.random.default_rng(0)
    many = [group(slot, [0.0, 1.0] * 20, rng) for slot in range(4)]
    batch = build_batch(many, manifest_sha256="m", policy="p", temperature=1.0, seed=7)

    def slowest(pairs_per_token: float) -> float:
        shares = deal(batch, range(160), weights, 10**6, pairs_per_token)
        assert sorted(k for share in shares for one in share for k in one.sequences) == list(range(160))
        loads = [sum(one.tokens for one in share) for share in shares]
        return max(load / weight for load, weight in zip(loads, weights, strict=True)) * sum(weights)

    prompts_once = int(batch.input_tokens.sum()) - (160 - 4) * 3
    assert slowest(1e9) < min(0.98 * slowest(0.0), 1.3 * prompts_once)


def test_sequences_that_share_their_prompt_have_it_once(batch: Batch) -> None:
    first, second = groups(batch)[:2]
    microbatch = fill(batch, [[shared(batch, first)], [shared(batch, second), *alone(batch, 0)]])
    prompt = batch.token_ids[batch.offsets[first[0]] :][:3]
    row = microbatch.token_ids[0]
    assert sum(np.array_equal(row[c : c + 3], prompt) for c in range(len(row))) == 1
    positions = microbatch.position_ids[0, : shared(batch, first).tokens]
    beyond_prompt = int((batch.input_tokens[first] > 3).sum())
    assert positions[1:][np.diff(positions) != 1].tolist() == [3] * (beyond_prompt - 1)


def test_gradient_is_the_same_with_a_shared_prompt(learner: Learner, batch: Batch) -> None:
    sequences = groups(batch)[0]
    parameters = list(learner.parameters.values())

    def gradients(microbatch: Microbatch) -> tuple[torch.Tensor, ...]:
        order = np.argsort(microbatch.engine_logprobs)
        logprobs = learner.logprobs(microbatch)[0][torch.from_numpy(order)]
        return torch.autograd.grad((logprobs * torch.arange(1, len(order) + 1)).mean(), parameters)

    one_by_one = gradients(fill(batch, [alone(batch, k) for k in sequences]))
    together = gradients(fill(batch, [[shared(batch, sequences)]]))
    scale = max(gradient.abs().max().item() for gradient in one_by_one)
    for mine, theirs in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * scale)


def test_no_position_is_beyond_the_longest_sequence(batch: Batch) -> None:
    for group in groups(batch)[:6]:
        microbatch = fill(batch, [[shared(batch, group)], alone(batch, 0)])
        assert microbatch.segments is not None
        assert microbatch.position_ids.max() < batch.input_tokens[[0, *group]].max()
