"""Find out by trying how a model's sequences can be laid into rows, and take the cheapest way."""

import importlib.util
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engines.short_model import short_windows
from rollout.trajectory import Picture
from trainer.batch.batch import Batch, Counts
from trainer.batch.packing import Bundle, Microbatch, Packing, fill
from trainer.model.attention import Kernel, brief
from trainer.model.packed_sequences import SequenceSeparation
from trainer.model.pictures import EXAMPLE
from trainer.model.token_logprobs import UnsupportedModel

logger = logging.getLogger(__name__)

KERNELS = ("causal_conv1d", "fla", "mamba_ssm")
"""Packages with kernels that transformers uses for recurrent layers where they are installed."""
BUILT_IN = ("window_size", "keep_window_size")
"""Such numbers that layers have taken when they were made, so that they cannot be shortened any more: where
one is long, trying would show nothing, and a row holds one sequence."""
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


@dataclass(frozen=True)
class Arrangement:
    """How a model's sequences are laid into rows, what it is told about them, and what computes attention."""

    separation: SequenceSeparation = SequenceSeparation.POSITIONS
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
        used = self.separation.value, self.packing, [kernel.value for kernel in self.works]
        return 1 + zlib.crc32(repr(used).encode())

    def __str__(self) -> str:
        several = f"several sequences, kept apart by {self.separation.value}"
        single = "one sequence and padding, because layers of this model may see the sequence before"
        shared = "shared" if self.packing.pairs_per_token else "not shared"
        kernels = [Kernel.OWN.value, *(kernel.value for kernel in self.works)]
        unused = [f"; {kernel.value} is not used: {why}" for kernel, why in self.kernels.items() if why]
        return (
            f"rows hold {several if self.packing.several else single}; prompts are {shared}; "
            f"attention: {', '.join(kernels)}{''.join(unused)}"
        )


Score = Callable[[Microbatch, SequenceSeparation, Kernel], Tensor]
"""The logprobs of a microbatch's trained tokens (N,)."""


@torch.no_grad()
def find_arrangement(
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
    pair = Bundle([0, 1], first.tokens + second.tokens - prompt, prompt)
    packed = fill(batch, [[first, second], [second]])
    plain = Kernel.OWN
    with short_windows([config, *layers], WINDOW):
        alone = [
            score(fill(batch, [[sequence]]), SequenceSeparation.POSITIONS, plain)
            for sequence in (first, second)
        ]
        one_row = replace(packed, position_ids=np.tile(np.arange(packed.token_ids.shape[1]), (2, 1)))
        scores = score(one_row, SequenceSeparation.POSITIONS, plain)
        trial = _PackingTrial(score, [*alone, alone[1]], scores, exact, words)
        is_telling = trial.is_telling and not _sees_farther_than_is_tried(config)
        is_told = agree(is_telling)
        pictures = [SequenceSeparation.PICTURES] if picture else []
        ways = (
            [
                SequenceSeparation.POSITIONS,
                SequenceSeparation.MASKS,
                *pictures,
                *[SequenceSeparation.KERNELS] * kernels,
            ]
            if is_told
            else []
        )
        separation = next((way for way in ways if agree(not trial.mistake(packed, way))), None)
        shared = fill(batch, [[pair]])
        masks = separation if separation in pictures else SequenceSeparation.MASKS
        shares = share_prompts and bool(ways) and agree(not trial.mistake(shared, masks))
        reasons: dict[Kernel, str] = {}
        for kernel in attention:
            has_one = any(not reason for reason in reasons.values())
            # The others would not be used, and may be compiled.
            if not separation or (has_one and not shares):
                break
            # Alone first: where one rank fails among layers that are gathered, the others would wait for it.
            reason = failure(kernel)
            if agree(not reason):
                if not has_one:  # else that one computes rows without shared prompts
                    reason = trial.mistake(packed, separation, kernel)
                if not reason and shares and not kernel.takes_bounds:
                    reason = trial.mistake(shared, masks, kernel)
            reasons[kernel] = "" if agree(not reason) else reason or "it fails on another rank"
        works = {kernel for kernel, reason in reasons.items() if not reason}
        if Kernel.VARLEN in works and Kernel.FLEX not in works:
            shares = False  # by a dense mask, which took ten times as long on an H100
        one_each = fill(batch, [[first], [second]])
        if not separation and not agree(trial.ignores_what_follows(one_each)):
            raise UnsupportedModel(
                f"a {config.model_type} model sees the tokens that it is to predict, and the padding behind "
                "them; train a causal decoder"
            )
    packing = Packing(several=separation is not None, pairs_per_token=6.0 * config.hidden_size * shares)
    return Arrangement(separation or SequenceSeparation.POSITIONS, packing, reasons, is_told)


def allowed_error(effect: float, exact: bool) -> float:
    """Return the largest error of a logprob that is no mistake, where a mistake makes one of `effect`."""
    return max((EXACT if exact else ROUNDED) * effect, ROUNDING)


def trial_rows(vocabulary: int, arrangement: Arrangement) -> list[Microbatch]:
    """Return microbatches of the kinds that the arrangement makes, to try something else with."""
    batch = _two_sequences(vocabulary)
    first, second = (Bundle([k], int(tokens)) for k, tokens in enumerate(batch.input_tokens))
    pair = Bundle([0, 1], first.tokens + second.tokens - PROMPT, PROMPT)
    rows_apart = [[first, second], [second]] if arrangement.packing.several else [[first], [second]]
    return [
        fill(batch, rows)
        for rows in (rows_apart, [[pair]] * bool(arrangement.packing.pairs_per_token))
        if rows
    ]


class _PackingTrial:
    """Compares the scores of packed sequences with those on their own."""

    def __init__(self, score: Score, alone: list[Tensor], scores: Tensor, exact: bool, words: slice) -> None:
        """`alone`: scores of the sequences in a packed microbatch's order; `scores`: these tokens' scores
        where the second sequence sees the first; `words`: of the first, behind the prompt, in the first row.
        """
        self._words = words
        self._score, self._alone = score, alone
        effect = float((scores - torch.cat(alone)).abs().max())
        tolerance = EXACT if exact else ROUNDED
        self.is_telling = effect > TELLING
        self._error = allowed_error(effect, exact)
        self._leak = max(min(tolerance, LEAK) * effect, ROUNDING)

    def mistake(self, packed: Microbatch, separation: SequenceSeparation, kernel: Kernel = Kernel.OWN) -> str:
        """Return the mistake in words; empty if the sequences score as they do alone, and alike whatever the
        words of the first are.
        """
        words = packed.token_ids.copy()
        words[0, self._words] = words[0, self._words][::-1]
        count = int(packed.sequences.max()) + 1
        try:
            scores = self._score(packed, separation, kernel)
            changed = self._score(replace(packed, token_ids=words), separation, kernel)
        except Exception as error:  # any family may refuse any argument in any way; it is not used then
            logger.debug("%s, %s: %s", separation, kernel, error)
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
            self._score(replace(microbatch, token_ids=token_ids), SequenceSeparation.POSITIONS, Kernel.OWN)[
                first_half
            ]
            for token_ids in (microbatch.token_ids, words)
        ]
        return float((scores[0] - scores[1]).abs().max()) < self._leak


def has_kernels() -> int:
    """Return which packages of KERNELS are installed, as bits of a number."""
    return sum(1 << k for k, name in enumerate(KERNELS) if importlib.util.find_spec(name))


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
