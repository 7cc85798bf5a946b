"""The rows that the embedded engine decodes together: their key-value cache, and one step of sampling.

Rows are left-padded to a common length, the attention mask hides the padding, and positions count from a
row's own first token, so that a row computes what it would compute alone, to within the rounding of the dtype
(1e-15 in float64). The random numbers are a function of (seed, position) only: a row draws the same tokens in
any batch.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from transformers import DynamicCache, PreTrainedModel

from rollout.counter_rng import uniforms

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy, as in vLLM."""
PREFILL_TOKENS = 16384
"""Prompt tokens, padding included, of one prefill at most; a longer prompt is one alone."""


@dataclass(eq=False)
class Generation:
    """One prompt and what to make of it: `n` rows, row j drawn with seed + j.

    `future` gets the rows once all are finished; cancelling it withdraws the request.
    """

    prompt_ids: list[int]
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int
    future: "Future[list[Row]]" = field(default_factory=Future)
    rows: "list[Row]" = field(init=False)
    started: bool = False

    def __post_init__(self) -> None:
        self.rows = [Row(self, j) for j in range(self.n)]


@dataclass(eq=False)
class Row:
    """One sample in the making. `finish_reason` is None until it is finished."""

    generation: Generation
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None


class Batch:
    """The running rows and their cache, in the same order. Used by one thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._clear()

    def join(self, rows: Sequence[Row]) -> None:
        """Add rows that have nothing generated yet."""
        for chunk in _prefill_chunks(rows):
            cache, mask = self._prefill(chunk)
            if self.rows:
                length = max(mask.shape[1], self._mask.shape[1])
                for mine, new in zip(_layers(self._cache), _layers(cache), strict=True):
                    mine.keys = torch.cat([_pad_left(mine.keys, length), _pad_left(new.keys, length)])
                    mine.values = torch.cat([_pad_left(mine.values, length), _pad_left(new.values, length)])
                missing = [length - self._mask.shape[1], length - mask.shape[1]]
                self._mask = torch.cat([pad(self._mask, (missing[0], 0)), pad(mask, (missing[1], 0))])
            else:
                self._cache, self._mask = cache, mask
            self.rows += chunk
        self._set_row_tensors()

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these, and the cache's columns that are padding to all of them."""
        self.rows = [self.rows[i] for i in indices]
        if not self.rows:
            self._clear()
            return
        kept = torch.tensor(indices)
        mask = self._mask[kept]
        first = int(mask.any(0).int().argmax())
        for layer in _layers(self._cache):
            layer.keys = layer.keys[kept, :, first:]
            layer.values = layer.values[kept, :, first:]
        self._mask = mask[:, first:]
        self._set_row_tensors()

    def step(self) -> tuple[list[int], list[float]]:
        """Draw the next token of every row; its token id and log-probability, in the order of `rows`.

        The caller appends them to the rows, and drops those that are finished, before the next step.
        """
        self._mask = pad(self._mask, (0, 1), value=1)
        output = self.model(
            input_ids=self._next[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        u = torch.from_numpy(uniforms(self._seeds, self._drawn))
        tokens, logprobs = draw(output.logits[:, -1].double(), self._temperature, self._top_p, u)
        self._next = tokens
        self._positions = self._positions + 1
        self._drawn = self._drawn + np.uint64(1)
        return tokens.tolist(), logprobs.tolist()

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, at temperature 1; whatever rows there are is left alone."""
        ids = torch.tensor(token_ids)
        logprobs = log_softmax(self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double(), -1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()

    def _prefill(self, rows: Sequence[Row]) -> tuple[DynamicCache, Tensor]:
        """Cache and mask of the rows' prompts but for the last token, which the rows' first step processes;
        each prompt is computed once, however many rows it has.
        """
        number_of = {
            generation: g for g, generation in enumerate(dict.fromkeys(row.generation for row in rows))
        }
        lengths = torch.tensor([len(generation.prompt_ids) - 1 for generation in number_of])
        width = max(1, int(lengths.max()))  # a prompt of one token gets a column that the mask hides
        ids = torch.zeros(len(number_of), width, dtype=torch.long)
        for generation, g in number_of.items():
            ids[g, : lengths[g]] = torch.tensor(generation.prompt_ids[:-1], dtype=torch.long)
        cache = DynamicCache()
        # Padded on the right here: a causal model needs no mask then, and no query is left with nothing to
        # attend to.
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        kept = torch.tensor([number_of[row.generation] for row in rows])
        shift = (width - lengths)[kept, None]
        columns = torch.arange(width)
        for layer in _layers(cache):
            layer.keys, layer.values = layer.keys[kept], layer.values[kept]
            if bool(shift.any()):
                source = ((columns - shift) % width)[:, None, :, None]
                layer.keys = torch.take_along_dim(layer.keys, source, dim=2)
                layer.values = torch.take_along_dim(layer.values, source, dim=2)
        return cache, (columns >= shift).long()

    def _set_row_tensors(self) -> None:
        """What a step needs of each row; (rows,) each."""
        generations = [row.generation for row in self.rows]
        self._seeds = np.array(
            [(row.generation.seed + row.index) % 2**64 for row in self.rows], dtype=np.uint64
        )
        self._drawn = np.array([len(row.token_ids) for row in self.rows], dtype=np.uint64)
        self._next = torch.tensor([(row.token_ids or row.generation.prompt_ids)[-1] for row in self.rows])
        self._positions = torch.tensor(
            [len(row.generation.prompt_ids) + len(row.token_ids) - 1 for row in self.rows]
        )
        self._temperature = torch.tensor([g.temperature for g in generations], dtype=torch.float64)
        self._top_p = torch.tensor([g.top_p for g in generations], dtype=torch.float64)

    def _clear(self) -> None:
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)  # (rows, length), 1 where there is a token
        self._set_row_tensors()


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, (B,) each, from logits (B, V) and per-row settings (B,), all float64.

    A row's token is the inverse of its cumulative distribution at u, in [0, 1). The log-probability is that
    of the distribution sampled from: after temperature and top_p; of a greedy row, the model's own
    (temperature 1). Raises FloatingPointError if the logits are not finite.
    """
    greedy = temperature < GREEDY_BELOW
    logprobs = log_softmax(logits / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    top_p = top_p.masked_fill(greedy, 1.0)
    if bool((top_p < 1).any()):
        logprobs = _nucleus(logprobs, top_p)
    cdf = logprobs.exp().cumsum(-1)
    total = cdf[:, -1]
    # Below the total whatever the rounding, so that the token found has a probability above zero.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if not bool(chosen.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: its weights are broken")
    return tokens, chosen


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most probable tokens until their sum reaches top_p, including that one."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    dropped = (before >= top_p[:, None]).scatter(1, order, before >= top_p[:, None])
    return log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)


def _prefill_chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows by length of their prompts, cut where a prefill would grow beyond PREFILL_TOKENS."""
    chunk: list[Row] = []
    prompts: set[Generation] = set()
    for row in sorted(rows, key=lambda row: len(row.generation.prompt_ids)):
        prompts.add(row.generation)
        if chunk and len(prompts) * len(row.generation.prompt_ids) > PREFILL_TOKENS:
            yield chunk
            chunk, prompts = [], {row.generation}
        chunk.append(row)
    if chunk:
        yield chunk


def _layers(cache: DynamicCache) -> list[Any]:
    """The layers; `keys` and `values` of each: (rows, heads, length, head_dim)."""
    return cache.layers


def _pad_left(states: Tensor, length: int) -> Tensor:
    """(rows, heads, L, head_dim) -> (rows, heads, length, head_dim), zeros in front."""
    return pad(states, (0, 0, length - states.shape[2], 0))
