"""Share an optimizer step's sequences out to ranks, and pack them into microbatches. Torch-free.

A bundle is a sequence, or several that share a prompt: the prompt once, then the rest of each sequence, for
which the attention needs a mask (trainer.model.packed_sequences). A microbatch is a rectangle of tokens,
rows x columns, as wide as its longest bundle. Shorter bundles share a row. `position_ids` restart where a
bundle begins, which keeps neighbours apart if there is no attention mask (an all-ones mask would let them see
each other). Padding fills the rest of a row and continues its last sequence; no token sees it, because it
comes last. If every row holds a single sequence, plain causal attention is enough. A sequence's last trained
token, and the tokens after it, are left out here: nothing is predicted from them.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.batch.batch import Batch


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
    temperatures: NDArray[np.float32]
    """(N,) at which the token was sampled."""
    sequences: NDArray[np.int64]
    """(N,) the token's sequence in the microbatch, numbered from 0."""
    tokens: int
    """Tokens in the rows, without padding."""
    segments: NDArray[np.int64] | None = None
    """(2, R, C) each token's segment, numbered from 0, and the earlier segment that it sees as well, or its
    own again; None if no prompt is shared."""
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """(N,); (0,) without a teacher."""
    members: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """(K,) the index in the batch of each sequence of the microbatch."""
    routes: NDArray[np.int16] | None = None
    """(R, C, layers x experts of a token) as Sample has them; None: each token takes its own."""
    pictures: Sequence[tuple[str, int, int]] | None = None
    """The digest of each picture in the rows, its first token in the flattened rows, and how many it has;
    None: the whole batch has none."""

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several bundles."""
        return bool((self.position_ids[:, 1:] == 0).any())


@dataclass(frozen=True)
class Packing:
    """What a model allows; see trainer.model.arrangement."""

    several: bool = True
    """A row may hold several sequences."""
    pairs_per_token: float = 0.0
    """So many pairs of attention cost as much as all other work on a token; 0: prompts are not shared."""


PACKED = Packing()


@dataclass
class Bundle:
    """A sequence of the batch, or several that share their prompt."""

    sequences: list[int]
    """Their indices in the batch."""
    tokens: int
    shared: int = 0
    """Tokens of the prompt that all of them share; 0 for a single sequence."""


CAUSAL, MASKED = 0.5, 2.0
"""Cost of attention in pairs, for the square of the tokens: without a mask half of the pairs; with a mask all
of them, at half the speed.
"""
FAIR = 1.1
"""The slowest rank may get this multiple of its fair share of a step."""


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


def pack_rows(lengths: Sequence[int], max_tokens: int, several: bool = True) -> list[list[list[int]]]:
    """Arrange sequences in microbatches of rows: the result's [microbatch][row] is a list of indices.

    rows x longest <= `max_tokens`, with padding; a longer sequence is alone in a microbatch. Unless `several`
    a row has one sequence; rows of a microbatch then have nearly the same length.
    """
    microbatches = []
    waiting = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    while waiting:
        width = lengths[waiting[0]]
        rows: list[list[int]] = []
        roomiest: list[tuple[int, int]] = []  # heap of (-free tokens, row)
        still_waiting = []
        for k in waiting:
            if several and roomiest and -roomiest[0][0] >= lengths[k]:
                free, row = heapq.heappop(roomiest)
                rows[row].append(k)
                heapq.heappush(roomiest, (free + lengths[k], row))
            elif not rows or (len(rows) + 1) * width <= max_tokens:
                heapq.heappush(roomiest, (lengths[k] - width, len(rows)))
                rows.append([k])
            else:
                still_waiting.append(k)
        microbatches.append(rows)
        waiting = still_waiting
    return microbatches


def plan_step(
    batch: Batch,
    step: range,
    rank_weights: Sequence[float],
    rank: int,
    max_tokens: int,
    packing: Packing = PACKED,
) -> list[Microbatch]:
    """Return the microbatches of one rank in one optimizer step; as many on every rank, some of them empty.

    `packing` is the same on every rank.
    """
    plans = [
        [[[share[b] for b in row] for row in rows] for rows in packed]
        for share in deal(batch, step, rank_weights, max_tokens, packing.pairs_per_token)
        for packed in [pack_rows([item.tokens for item in share], max_tokens, packing.several)]
    ]
    count = max(len(plan) for plan in plans)
    own_rows = plans[rank]
    return [fill(batch, own_rows[k] if k < len(own_rows) else []) for k in range(count)]


def deal(
    batch: Batch, step: range, weights: Sequence[float], max_tokens: int, pairs_per_token: float
) -> list[list[Bundle]]:
    """Return each rank's bundles: as large as pays, but smaller if that would leave a rank behind.

    Large bundles save the most tokens, small ones can be dealt out evenly; the slowest rank decides.
    """
    best: list[list[Bundle]] = []
    least = math.inf
    fair = int(batch.input_tokens[step.start : step.stop].sum()) / len(weights)
    for limit in (max_tokens, fair / 2, fair / 4, fair / 8, 0):
        bundles = bundle(batch, step, pairs_per_token, min(limit, max_tokens))
        tokens = [item.tokens for item in bundles]
        shares = split_ranks(tokens, weights)
        loads = [sum(tokens[b] for b in share) for share in shares]
        slowest = max(load / weight for load, weight in zip(loads, weights, strict=True))
        if slowest < least:
            best, least = [[bundles[b] for b in share] for share in shares], slowest
        if slowest <= FAIR * sum(tokens) / sum(weights) or not pairs_per_token:
            break
    return best


def bundle(batch: Batch, step: range, pairs_per_token: float, max_tokens: float) -> list[Bundle]:
    """Put sequences with one prompt together if that is cheaper, in bundles of at most `max_tokens`.

    Sharing saves the prompt and costs attention: a mask hides pairs of tokens, but they are computed.
    `pairs_per_token`: this number of pairs costs as much as all other work on a token; 0: nothing is shared.
    No bundle has more tokens than that, so its mask stays small beside what a layer keeps of the tokens.
    """
    max_tokens = min(max_tokens, pairs_per_token)
    prompts, tokens = batch.prompt_tokens.tolist(), batch.input_tokens.tolist()
    bundles: list[Bundle] = []
    latest: dict[bytes, Bundle] = {}  # of each prompt

    def cost(count: int, several: bool) -> float:
        return count + (MASKED if several else CAUSAL) * count**2 / pairs_per_token

    for k in sorted(step, key=lambda k: (-tokens[k], k)):
        bundles.append(alone := Bundle([k], tokens[k]))
        if not pairs_per_token or not prompts[k]:
            continue
        begin = int(batch.offsets[k])
        prompt = batch.token_ids[begin : begin + prompts[k]].tobytes()
        if batch.pictures:  # of two pictures the tokens are the same
            prompt += repr([shown for shown in batch.pictures[k] if shown.begin < prompts[k]]).encode()
        filling = latest.setdefault(prompt, alone)
        together = filling.tokens + tokens[k] - prompts[k]
        costs_apart = cost(filling.tokens, filling.shared > 0) + cost(tokens[k], several=False)
        if filling is not alone and together <= max_tokens and cost(together, several=True) < costs_apart:
            filling.sequences.append(k)
            filling.tokens, filling.shared = together, prompts[k]
            bundles.pop()
        else:
            latest[prompt] = alone
    return bundles


def fill(batch: Batch, rows: Sequence[Sequence[Bundle]]) -> Microbatch:
    """Lay bundles of the batch's sequences into the rows of a microbatch."""
    offsets, inputs = batch.offsets.tolist(), batch.input_tokens.tolist()
    width = max((sum(item.tokens for item in row) for row in rows), default=0)
    segments: list[list[int]] = []
    """[index of its first token in the batch, tokens, padding behind them, first position, segment before]"""
    laid: list[tuple[int, int, int, int]] = []
    """(index of a sequence in the batch, tokens shared, where they begin in the rows, where its own do)"""
    for r, row in enumerate(rows):
        at = r * width
        for item in row:
            start, prompt = at, len(segments)
            if item.shared:
                segments.append([offsets[item.sequences[0]], item.shared, 0, 0, prompt])
                at += item.shared
            for k in item.sequences:
                alone = inputs[k] - item.shared
                before = prompt if item.shared else len(segments)
                segments.append([offsets[k] + item.shared, alone, 0, item.shared, before])
                laid.append((k, item.shared, start, at))
                at += alone
        segments[-1][2] = (r + 1) * width - at
    shape = len(rows), width
    first, tokens, padding, position, before = np.array(segments, np.int64).reshape(-1, 5).T
    numbers = np.repeat(np.arange(len(segments)), tokens + padding)
    within = _ranges(np.zeros(len(segments), np.int64), tokens + padding)
    real = within < tokens[numbers]
    is_masked = any(item.shared for row in rows for item in row)
    token_ids = np.zeros(len(numbers), np.int64)
    token_ids[real] = batch.token_ids[(first[numbers] + within)[real]]
    routes = None
    if len(batch.routes):
        of_tokens = batch.routes.reshape(len(batch.token_ids), -1)
        routes = np.full((len(numbers), of_tokens.shape[1]), -1, np.int16)
        routes[real] = of_tokens[(first[numbers] + within)[real]]
        routes = routes.reshape(*shape, -1)
    sequences, shared, start, own_begins = np.array(laid, np.int64).reshape(-1, 4).T
    begins, lengths = batch.offsets[sequences], batch.lengths()[sequences]
    trained = _ranges(begins, lengths)
    of_sequence = np.repeat(np.arange(len(sequences)), lengths)
    is_trained = batch.loss_mask[trained] == 1
    trained, of_sequence = trained[is_trained], of_sequence[is_trained]
    scoring = trained - begins[of_sequence] - 1  # in the sequence
    return Microbatch(
        token_ids=token_ids.reshape(shape),
        # Padding continues the positions. With a mask it might exceed the model's longest position.
        position_ids=np.where(real | (not is_masked), position[numbers] + within, 0).reshape(shape),
        scored_at=scoring
        + np.where(
            scoring < shared[of_sequence], start[of_sequence], own_begins[of_sequence] - shared[of_sequence]
        ),
        targets=batch.token_ids[trained].astype(np.int64),
        engine_logprobs=batch.logprobs[trained],
        advantages=(
            batch.token_advantages[trained]
            if len(batch.token_advantages)
            else batch.advantages[sequences][of_sequence]
        ),
        temperatures=batch.temperatures[sequences][of_sequence],
        sequences=of_sequence,
        tokens=int(real.sum()),
        segments=np.stack([numbers, before[numbers]]).reshape(2, *shape) if is_masked else None,
        teacher_logprobs=batch.teacher_logprobs[trained if len(batch.teacher_logprobs) else trained[:0]],
        members=sequences,
        routes=routes,
        pictures=list(_pictures(batch, laid)) if batch.pictures else None,
    )


def _pictures(batch: Batch, laid: Sequence[tuple[int, int, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield the pictures of laid sequences, as Microbatch has them. A prompt that several sequences share is
    there once, and so are its pictures.
    """
    prompts = set[int]()
    for k, shared, start, own_begins in laid:
        for picture in batch.pictures[k]:
            begin = start if picture.begin < shared else own_begins - shared
            if picture.begin >= shared or start not in prompts:
                yield picture.digest, begin + picture.begin, picture.end - picture.begin
        prompts.add(start)


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ..., `length` numbers from each start, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)
