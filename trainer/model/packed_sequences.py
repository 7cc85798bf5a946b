"""Keep the sequences of a row apart: what a model must be told besides positions, found out by trying.

Restarting positions are enough where a family makes its mask from them. Where it does not, a mask for each
kind of attention layer is passed. Recurrent and convolution layers have no mask. Their kernels take bounds
of sequences, but their plain PyTorch code does not: there a row holds one sequence. The same masks let
several samples share their prompt, so that it is computed once (the idea is from Prefix Grouper, arXiv
2506.05433).
"""

import importlib.util
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rollout.trajectory import Picture
from trainer.batch.batch import Batch, Counts
from trainer.batch.packing import Bundle, Microbatch, Packing, fill
from trainer.model.attention import Kernel, brief
from trainer.model.pictures import EXAMPLE
from trainer.model.token_logprobs import UnsupportedModel

logger = logging.getLogger(__name__)


class Apart(Enum):
    """What a model gets to keep the sequences of a row apart, the cheapest first."""

    POSITIONS = "positions"
    """Positions that restart with each sequence, and no mask."""
    MASKS = "masks"
    """A mask for each kind of attention layer as well."""
    PICTURES = "masks of whole pictures"
    """The same, in which tokens of a picture see those behind them that are of it too (Gemma 3)."""
    KERNELS = "kernels"
    """The bounds of the sequences as well, which the kernels of recurrent layers take."""


@dataclass(frozen=True)
class Arrangement:
    """How a model's sequences are laid into rows, what it is told about them, and what computes attention."""

    apart: Apart = Apart.POSITIONS
    packing: Packing = field(default_factory=Packing)
    kernels: Mapping[Kernel, str] = field(default_factory=dict)
    """The kernels that were tried beside the model's own, and why one is not used; "" if it is."""
    is_told: bool = True
    """Whether trying could tell anything: the sequence before makes a difference if it is seen."""

    @property
    def works(self) -> list[Kernel]:
        """The kernels that may be used."""
        return [kernel for kernel, reason in self.kernels.items() if not reason]

    @property
    def number(self) -> int:
        """A number above 0, the same for arrangements that are used alike."""
        used = self.apart.value, self.packing, [kernel.value for kernel in self.works]
        return 1 + zlib.crc32(repr(used).encode())

    def __str__(self) -> str:
        several = f"several sequences, kept apart by {self.apart.value}"
        single = "one sequence and padding, because layers of this model may see the sequence before"
        shared = "shared" if self.packing.pairs_per_token else "not shared"
        kernels = [Kernel.OWN.value, *(kernel.value for kernel in self.works)]
        unused = [f"; {kernel.value} is not used: {why}" for kernel, why in self.kernels.items() if why]
        return (
            f"rows hold {several if self.packing.several else single}; prompts are {shared}; "
            f"attention: {', '.join(kernels)}{''.join(unused)}"
        )


KERNELS = ("causal_conv1d", "fla", "mamba_ssm")
"""Packages with kernels that transformers uses for recurrent layers where they are installed."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Numbers of a config that say how far back some of its layers see, in tokens."""
BUILT_IN = ("window_size", "keep_window_size")
"""The same where layers have taken the number when they were made, so that it cannot be shortened any more:
where it is long, trying would show nothing, and a row holds one sequence."""
UNMASKED = ("linear_attention", "conv")
"""Kinds of layers, as transformers names them, that take no attention mask."""
PROMPT, TOKENS, WINDOW = 2, (24, 17), 6
"""What is tried: two sequences of so many tokens, the first of which are the same, and a window shorter than
both, whatever the model's own is."""
EXACT, ROUNDED, LEAK = 1e-3, 0.1, 0.01
"""Allowed errors, as fractions of the difference that the sequence before makes if it is seen: of the
logprobs of a sequence on its own, computed in float32 or bfloat16 (more than rounding, less than a mistake),
and of their change with the words of a neighbour (no more than what experts round in bfloat16)."""
ROUNDING, TELLING = 1e-5, 1e-4
"""An error of a logprob that is always allowed; the least difference that the sequence before must make, or
nothing can be told from trying, and a row holds one sequence."""


def decoder_inputs(
    microbatch: Microbatch,
    apart: Apart,
    kernel: Kernel,
    config: Any,
    device: torch.device,
    divided: bool = False,
    is_picture: Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a transformers decoder for the microbatch's tokens, on `device`.

    With bounds, of Apart.KERNELS or of the attention's `kernel`, the rows become one long row, because the
    kernels of recurrent layers take bounds within a single row. `config` must name the kernel's attention.
    `divided`: the model will see some of the columns, and can make no mask of them itself. `is_picture` (R,
    C): where features of pictures are.
    """
    positions = microbatch.position_ids
    is_packed = microbatch.is_packed
    needs_mask = microbatch.segments is not None or (
        (divided or (is_packed and apart is not Apart.POSITIONS)) and not kernel.takes_bounds
    )
    token_ids, segments = microbatch.token_ids, microbatch.segments
    inputs: dict[str, Any] = {}
    if kernel.takes_bounds or (is_packed and apart is Apart.KERNELS and segments is None):
        token_ids, positions = token_ids.reshape(1, -1), positions.reshape(1, -1)
        inputs = _bounds(positions, device)
    inputs["input_ids"] = torch.from_numpy(token_ids).to(device)
    inputs["position_ids"] = torch.from_numpy(positions).to(device)
    if needs_mask:
        if segments is None:
            numbers = np.cumsum(positions == 0, axis=1)
            segments = np.stack([numbers, numbers])
        whole = is_picture if apart is Apart.PICTURES else None
        inputs["attention_mask"] = attention_masks(
            torch.from_numpy(segments).to(device), inputs["position_ids"], config, whole
        )
    return inputs


def _bounds(positions: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return what recurrent kernels take, by transformers' names: (sequences + 1,) bounds, (1, C) numbers."""
    starts = np.flatnonzero(positions[0] == 0)
    bounds = np.append(starts, positions.size).astype(np.int32)
    numbers = (np.cumsum(positions == 0, axis=1) - 1).astype(np.int32)
    ends = torch.from_numpy(bounds).to(device)
    longest = int(np.diff(bounds).max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": torch.from_numpy(numbers).to(device),
    }


def attention_masks(segments: Tensor, position_ids: Tensor, config: Any, whole: Tensor | None = None) -> Any:
    """Return the mask that the model's attention takes, or a dict of them by kind of layer if it has kinds.

    `segments` (2, R, C): see Microbatch; `position_ids` (R, C). A mask is what transformers makes for the
    config's attention: (R, 1, C, C), boolean for sdpa and added for eager, or flex attention's BlockMask.
    `whole` (R, C): neighbours here see each other, also ahead.
    """
    segment, before = segments
    blocks = None if whole is None else _blocks(whole.to(position_ids.device))
    make = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]

    def mask(reaches: Callable[[Tensor, Tensor], Tensor] | None) -> Any:
        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            theirs = segment[row, key]
            seen = ((segment[row, query] == theirs) | (before[row, query] == theirs)) & (key <= query)
            if blocks is not None:
                seen = seen | ((blocks[row, query] == blocks[row, key]) & (blocks[row, query] > 0))
            if reaches is None:
                return seen
            return seen & reaches(position_ids[row, query], position_ids[row, key])

        rows, columns = position_ids.shape
        return make(
            batch_size=rows,
            q_length=columns,
            kv_length=columns,
            mask_function=sees,
            allow_is_causal_skip=False,
            dtype=torch.float32,
            device=position_ids.device,
            config=config,
        )

    window, chunk = (getattr(config, name, None) for name in WINDOWS)
    in_window = (lambda query, key: query - key < window) if window else None
    in_chunk = (lambda query, key: query // chunk == key // chunk) if chunk else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return mask(in_window or in_chunk)
    masks: dict[str, Any] = dict.fromkeys([*kinds, "full_attention"], mask(None))
    masks |= dict.fromkeys(UNMASKED)
    if window:
        masks["sliding_attention"] = mask(in_window)
    if chunk:
        masks["chunked_attention"] = mask(in_chunk)
    return masks


def _blocks(whole: Tensor) -> Tensor:
    """(R, C) numbers from 1 of the runs of `whole` in each row; elsewhere 0."""
    begins = whole.clone()
    begins[:, 1:] &= ~whole[:, :-1]
    return begins.cumsum(1) * whole


Score = Callable[[Microbatch, Apart, Kernel], Tensor]
"""The logprobs of a microbatch's trained tokens (N,)."""


@torch.no_grad()
def arrange(
    config: Any,
    score: Score,
    agree: Callable[[bool], bool],
    *,
    share_prompts: bool,
    kernels: bool,
    exact: bool,
    layers: Iterable[Any] = (),
    attention: Sequence[Kernel] = (),
    failure: Callable[[Kernel], str] = lambda _: "",
    picture: Sequence[int] = (),
) -> Arrangement:
    """Try how the model's sequences can be laid into rows, and take the cheapest way that changes no score.

    `agree`: whether it is so on all ranks, which call this together. `kernels`: try KERNELS, too. `exact`:
    the model computes in float32. `layers`: the model's modules, some of which have its windows. `attention`:
    kernels to try beside the model's own attention; `failure`: why one cannot compute it here, or "".
    `picture`: the tokens of trainer.model.pictures.EXAMPLE, if that is to be shown in the prompts.

    A layer has about 12 h^2 weights with two operations each, and spends 4 h operations on a pair of tokens,
    so `pairs_per_token` is 24 h^2 / 4 h = 6 h. Raises UnsupportedModel if the model looks ahead.
    """
    batch = _two_sequences(config.vocab_size, picture)
    prompt = PROMPT + len(picture)
    words = slice(prompt + len(picture), int(batch.input_tokens[0]))
    first, second = (Bundle([k], int(tokens)) for k, tokens in enumerate(batch.input_tokens))
    both = Bundle([0, 1], first.tokens + second.tokens - prompt, prompt)
    packed = fill(batch, [[first, second], [second]])
    plain = Kernel.OWN
    with _short_windows([config, *layers]):
        alone = [score(fill(batch, [[sequence]]), Apart.POSITIONS, plain) for sequence in (first, second)]
        one_row = replace(packed, position_ids=np.tile(np.arange(packed.token_ids.shape[1]), (2, 1)))
        seen = score(one_row, Apart.POSITIONS, plain)
        trial = _Trial(score, [*alone, alone[1]], seen, exact, words)
        is_telling = trial.is_telling and not _sees_farther_than_is_tried(config)
        is_told = agree(is_telling)
        pictures = [Apart.PICTURES] if picture else []
        ways = [Apart.POSITIONS, Apart.MASKS, *pictures, *[Apart.KERNELS] * kernels] if is_told else []
        apart = next((way for way in ways if agree(not trial.mistake(packed, way))), None)
        shared, masks = fill(batch, [[both]]), apart if apart in pictures else Apart.MASKS
        shares = share_prompts and bool(ways) and agree(not trial.mistake(shared, masks))
        reasons: dict[Kernel, str] = {}
        for kernel in attention:
            has_one = any(not reason for reason in reasons.values())
            if not apart or (has_one and not shares):  # the others would not be used, and may be compiled
                break
            # Alone first: where one rank fails among layers that are gathered, the others would wait for it.
            reason = failure(kernel)
            if agree(not reason):
                if not has_one:  # else that one computes rows without shared prompts
                    reason = trial.mistake(packed, apart, kernel)
                if not reason and shares and not kernel.takes_bounds:
                    reason = trial.mistake(shared, masks, kernel)
            reasons[kernel] = "" if agree(not reason) else reason or "it fails on another rank"
        works = {kernel for kernel, reason in reasons.items() if not reason}
        if Kernel.VARLEN in works and Kernel.FLEX not in works:
            shares = False  # by a dense mask, which took ten times as long on an H100
        one_each = fill(batch, [[first], [second]])
        if not apart and not agree(trial.ignores_what_follows(one_each)):
            raise UnsupportedModel(
                f"a {config.model_type} model sees the tokens that it is to predict, and the padding behind "
                "them; train a causal decoder"
            )
    packing = Packing(several=apart is not None, pairs_per_token=6.0 * config.hidden_size * shares)
    return Arrangement(apart or Apart.POSITIONS, packing, reasons, is_told)


def allowed_error(effect: float, exact: bool) -> float:
    """Return the largest error of a logprob that is no mistake, where a mistake makes one of `effect`."""
    return max((EXACT if exact else ROUNDED) * effect, ROUNDING)


def trial_rows(vocabulary: int, arrangement: Arrangement) -> list[Microbatch]:
    """Return microbatches of the kinds that the arrangement makes, to try something else with."""
    batch = _two_sequences(vocabulary)
    first, second = (Bundle([k], int(tokens)) for k, tokens in enumerate(batch.input_tokens))
    both = Bundle([0, 1], first.tokens + second.tokens - PROMPT, PROMPT)
    apart = [[first, second], [second]] if arrangement.packing.several else [[first], [second]]
    return [
        fill(batch, rows) for rows in (apart, [[both]] * bool(arrangement.packing.pairs_per_token)) if rows
    ]


class _Trial:
    """Compares the scores of packed sequences with those on their own."""

    def __init__(self, score: Score, alone: list[Tensor], seen: Tensor, exact: bool, words: slice) -> None:
        """`alone`: scores of the sequences in a packed microbatch's order; `seen`: these tokens' scores where
        the second sequence sees the first; `words`: of the first, behind the prompt, in the first row."""
        self._words = words
        self._score, self._alone = score, alone
        effect = float((seen - torch.cat(alone)).abs().max())
        tolerance = EXACT if exact else ROUNDED
        self.is_telling = effect > TELLING
        self._error = allowed_error(effect, exact)
        self._leak = max(min(tolerance, LEAK) * effect, ROUNDING)

    def mistake(self, packed: Microbatch, apart: Apart, kernel: Kernel = Kernel.OWN) -> str:
        """Return what is wrong; empty if the sequences score as they do alone, and alike whatever the words
        of the first are.
        """
        words = packed.token_ids.copy()
        words[0, self._words] = words[0, self._words][::-1]
        count = int(packed.sequences.max()) + 1
        try:
            scores = self._score(packed, apart, kernel)
            changed = self._score(replace(packed, token_ids=words), apart, kernel)
        except Exception as error:  # any family may refuse any argument in any way; it is not used then
            logger.debug("%s, %s: %s", apart, kernel, error)
            return brief(error)
        mistake = float((scores - torch.cat(self._alone[:count])).abs().max())
        leak = float((changed - scores)[torch.from_numpy(packed.sequences > 0)].abs().max())
        if mistake < self._error and leak < self._leak:
            return ""
        return "sequences of a row do not score as they do alone"

    def ignores_what_follows(self, microbatch: Microbatch) -> bool:
        """Return whether scores in the first half of the words stay if those of the second half change."""
        columns = microbatch.token_ids.shape[1]
        middle, words = (self._words.start + columns) // 2, microbatch.token_ids.copy()
        words[:, middle:] = words[:, middle:][:, ::-1]
        first_half = torch.from_numpy(microbatch.scored_at % columns < middle)
        scores = [
            self._score(replace(microbatch, token_ids=token_ids), Apart.POSITIONS, Kernel.OWN)[first_half]
            for token_ids in (microbatch.token_ids, words)
        ]
        return float((scores[0] - scores[1]).abs().max()) < self._leak


def has_kernels() -> int:
    """Return which packages of KERNELS are installed, as bits of a number."""
    return sum(1 << k for k, name in enumerate(KERNELS) if importlib.util.find_spec(name))


@contextmanager
def _short_windows(holders: Iterable[Any]) -> Iterator[None]:
    """Inside, the model's windows are shorter than the sequences tried, so that a wrong one shows.

    `holders`: the config, from which masks are made, and the modules, whose windows go to the attention.
    """
    before: list[tuple[Any, str, int]] = []
    for holder in holders:
        for name in WINDOWS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > WINDOW:
                before.append((holder, name, value))
                setattr(holder, name, WINDOW)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _sees_farther_than_is_tried(config: Any) -> bool:
    return any((getattr(config, name, None) or 0) >= min(TOKENS) for name in BUILT_IN)


def _two_sequences(vocabulary: int, picture: Sequence[int] = ()) -> Batch:
    """Sequences of TOKENS, whose first PROMPT tokens, and a picture behind them, are the same and not
    trained. The first has the picture twice: what is at one place in it is elsewhere in the second.
    """
    rng, prompt = np.random.default_rng(0), PROMPT + len(picture)
    words = [rng.integers(0, vocabulary, length) for length in TOKENS]
    words[1][:PROMPT] = words[0][:PROMPT]
    words = [
        np.concatenate([few[:PROMPT], *[picture] * times, few[PROMPT:]])
        for few, times in zip(words, (2, 1), strict=True)
    ]
    trained = [
        np.arange(len(few)) >= len(few) - length + PROMPT for few, length in zip(words, TOKENS, strict=True)
    ]
    shown = [Picture(EXAMPLE, PROMPT, prompt), Picture(EXAMPLE, prompt, prompt + len(picture))]
    first, total = len(words[0]), sum(map(len, words))
    nothing = np.zeros(2, np.float32)
    return Batch(
        token_ids=np.concatenate(words).astype(np.int32),
        loss_mask=np.concatenate(trained).astype(np.uint8),
        logprobs=np.zeros(total, np.float32),
        offsets=np.array([0, first, total]),
        advantages=nothing,
        rewards=nothing,
        slots=np.zeros(2, np.int32),
        temperatures=np.ones(2, np.float32),
        ages=np.zeros(total, np.int32),
        counts=Counts(0, 0, 0, 0, 0, 0.0, 0.0),
        manifest_sha256="",
        policy="",
        seed=0,
        pictures=[shown, shown[:1]] if picture else (),
    )
