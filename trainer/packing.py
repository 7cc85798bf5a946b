"""An optimizer step's sequences: which rank takes which, and how they lie in microbatches. Torch-free.

A microbatch is a rectangle of tokens, rows x columns, as wide as its longest sequence. Shorter sequences
share a row; `position_ids` restart where a sequence begins, and without an attention mask that keeps
neighbours apart (an all-ones mask would let them see each other). What is left of a row continues its last
sequence with padding, which nothing sees because it comes last: where every row holds a single sequence,
plain causal attention does.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.batch import Batch


@dataclass(frozen=True, eq=False)
class Microbatch:
    """R rows of C columns, N of whose tokens are trained; N = 0 and no rows for an empty one."""

    token_ids: NDArray[np.int64]
    """(R, C), padding is 0."""
    position_ids: NDArray[np.int64]
    """(R, C)"""
    scored_at: NDArray[np.int64]
    """(N,) index, into the flattened rows, of the logit that scores each trained token: one before it."""
    targets: NDArray[np.int64]
    """(N,) the trained tokens."""
    engine_logprobs: NDArray[np.float32]
    """(N,)"""
    advantages: NDArray[np.float32]
    """(N,)"""
    sequences: NDArray[np.int64]
    """(N,) which of the microbatch's sequences the token belongs to, numbered from 0."""


def split_steps(sequences: int, global_batch_size: int) -> list[range]:
    """Cut a batch into optimizer steps of nearly equal size, none larger than `global_batch_size` sequences.

    Equal, because a small remainder would be a noisy step at the full learning rate.
    """
    steps = -(-sequences // global_batch_size)
    bounds = [sequences * k // max(steps, 1) for k in range(steps + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def split_ranks(lengths: Sequence[int], weights: Sequence[float]) -> list[list[int]]:
    """Deal sequences of `lengths` tokens to ranks so that each one's tokens follow its weight.

    Longest first, each to the rank that is furthest behind its share: every sequence exactly once, and a pure
    function of its arguments, so all ranks agree without talking. Returns the indices of each rank.
    """
    shares: list[list[int]] = [[] for _ in weights]
    tokens = [0] * len(weights)
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        rank = min(range(len(weights)), key=lambda r: ((tokens[r] + lengths[k]) / weights[r], r))
        shares[rank].append(k)
        tokens[rank] += lengths[k]
    return shares


def pack_rows(lengths: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """Arrange sequences in microbatches of rows: the result's [microbatch][row] is a list of indices.

    rows x longest <= `max_tokens`, padding included; a sequence longer than that is a microbatch of its own.
    """
    microbatches = []
    waiting = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    while waiting:
        width = lengths[waiting[0]]
        rows: list[list[int]] = []
        roomiest: list[tuple[int, int]] = []  # heap of (-free tokens, row)
        left = []
        for k in waiting:
            if roomiest and -roomiest[0][0] >= lengths[k]:
                free, row = heapq.heappop(roomiest)
                rows[row].append(k)
                heapq.heappush(roomiest, (free + lengths[k], row))
            elif not rows or (len(rows) + 1) * width <= max_tokens:
                heapq.heappush(roomiest, (lengths[k] - width, len(rows)))
                rows.append([k])
            else:
                left.append(k)
        microbatches.append(rows)
        waiting = left
    return microbatches


def plan_step(
    batch: Batch, step: range, rank_weights: Sequence[float], rank: int, max_tokens: int
) -> list[Microbatch]:
    """The microbatches of one rank in one optimizer step; as many on every rank, some of them empty."""
    lengths = batch.lengths()[step.start : step.stop].tolist()
    plans = [
        [[[step.start + share[k] for k in row] for row in rows] for rows in packed]
        for share in split_ranks(lengths, rank_weights)
        for packed in [pack_rows([lengths[k] for k in share], max_tokens)]
    ]
    count = max(len(plan) for plan in plans)
    mine = plans[rank]
    return [fill(batch, mine[k] if k < len(mine) else []) for k in range(count)]


def fill(batch: Batch, rows: Sequence[Sequence[int]]) -> Microbatch:
    """Lay sequences of the batch, given by index, into the rows of a microbatch."""
    lengths = batch.lengths()
    width = max((int(sum(lengths[k] for k in row)) for row in rows), default=0)
    token_ids = np.zeros((len(rows), width), np.int64)
    position_ids = np.zeros((len(rows), width), np.int64)
    scored_at = [np.zeros(0, np.int64)]
    trained = [np.zeros(0, np.int64)]
    advantages = [np.zeros(0, np.float32)]
    sequences = [np.zeros(0, np.int64)]
    for r, row in enumerate(rows):
        column = 0
        for k in row:
            begin, end = int(batch.offsets[k]), int(batch.offsets[k + 1])
            token_ids[r, column : column + end - begin] = batch.token_ids[begin:end]
            position_ids[r, column:] = np.arange(width - column)  # the next sequence overwrites its own part
            at = np.flatnonzero(batch.loss_mask[begin:end])
            scored_at.append(r * width + column + at - 1)
            trained.append(begin + at)
            advantages.append(np.full(len(at), batch.advantages[k]))
            sequences.append(np.full(len(at), len(sequences) - 1))
            column += end - begin
    tokens = np.concatenate(trained)
    return Microbatch(
        token_ids=token_ids,
        position_ids=position_ids,
        scored_at=np.concatenate(scored_at),
        targets=batch.token_ids[tokens].astype(np.int64),
        engine_logprobs=batch.logprobs[tokens],
        advantages=np.concatenate(advantages),
        sequences=np.concatenate(sequences),
    )
