"""The rows that the embedded engine decodes together: their key-value cache, and one step of sampling.

Rows are left-padded to a common length, the attention mask hides the padding, and positions count from a
row's own first token. So a row computes what it would compute alone, except for the rounding of the dtype
(1e-15 in float64). Random numbers depend on (seed, position) only, so a row draws the same tokens in any
batch.
"""

import itertools
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
"""The most prompt tokens of one prefill, with padding; a longer prompt gets its own prefill."""


@dataclass(eq=False)
class Generation:
    """A request: `n` rows of one prompt; row j is drawn with seed + j.

    `future` gets the rows when all are finished; cancelling it withdraws the request.
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
    """A sample that is being generated. `finish_reason` is None until it is finished."""

    generation: Generation
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None


class Batch:
    """The running rows and their cache, in the same order. Only one thread may use it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self._clear()

    def join(self, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        """Add new rows at the end of `rows`, and draw the first token of each. Returns token ids and
        log-probabilities, in the order of the rows. The caller goes on as after `step`.
        """
        begin, logits = len(self.rows), list[Tensor]()
        chunks = list(_prefill_chunks(rows))
        self.rows += itertools.chain(*chunks)  # first, so that these requests fail too if the model fails
        for chunk in chunks:
            cache, mask, last = self._prefill(chunk)
            logits.append(last)
            if len(self._mask):
                length = max(mask.shape[1], self._mask.shape[1])
                for mine, new in zip(_layers(self._cache), _layers(cache), strict=True):
                    mine.keys = torch.cat([_pad_left(mine.keys, length), _pad_left(new.keys, length)])
                    mine.values = torch.cat([_pad_left(mine.values, length), _pad_left(new.values, length)])
                missing = [length - self._mask.shape[1], length - mask.shape[1]]
                self._mask = torch.cat([pad(self._mask, (missing[0], 0)), pad(mask, (missing[1], 0))])
            else:
                self._cache, self._mask = cache, mask
        self._set_row_tensors()
        return self._draw(begin, torch.cat(logits))

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these rows, and drop the cache's columns that are padding in all of them."""
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
        """Draw the next token of every row. Returns token ids and log-probabilities, in the order of `rows`.

        The caller appends them to the rows, and drops finished rows, before the next step.
        """
        self._mask = pad(self._mask, (0, 1), value=1)
        output = self.model(
            input_ids=self._next[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        return self._draw(0, output.logits[:, -1])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, at temperature 1. The rows do not change."""
        ids = torch.tensor(token_ids)
        logprobs = log_softmax(self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double(), -1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()

    def _prefill(self, rows: Sequence[Row]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Cache, mask and last logits (rows, V) of the rows' prompts. Each prompt is computed once for all
        its rows.
        """
        number_of = {
            generation: g for g, generation in enumerate(dict.fromkeys(row.generation for row in rows))
        }
        width = max(len(generation.prompt_ids) for generation in number_of)
        ids = torch.zeros(len(number_of), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for generation, g in number_of.items():
            begin = width - len(generation.prompt_ids)
            ids[g, begin:] = torch.tensor(generation.prompt_ids, dtype=torch.long)
            mask[g, begin:] = 1
        cache = DynamicCache()
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        kept = torch.tensor([number_of[row.generation] for row in rows])
        for layer in _layers(cache):
            layer.keys, layer.values = layer.keys[kept], layer.values[kept]
        return cache, mask[kept], output.logits[kept, -1]

    def _draw(self, begin: int, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw the next token of the rows from `begin` on."""
        u = torch.from_numpy(uniforms(self._seeds[begin:], self._drawn[begin:]))
        tokens, logprobs = draw(logits.double(), self._temperature[begin:], self._top_p[begin:], u)
        self._next[begin:] = tokens
        self._positions[begin:] += 1
        self._drawn[begin:] += np.uint64(1)
        return tokens.tolist(), logprobs.tolist()

    def _set_row_tensors(self) -> None:
        """Set the tensors that a step needs, (rows,) each."""
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
    """Draw token ids and log-probabilities, (B,) each, from logits (B, V) and per-row settings (B,), all
    float64.

    A row's token is the inverse of its cumulative distribution at u, in [0, 1). The log-probability is after
    temperature and top_p, i.e. in the distribution sampled from; of a greedy row it is the model's own
    (temperature 1). Raises FloatingPointError if the logits are not finite.
    """
    greedy = temperature < GREEDY_BELOW
    logprobs = log_softmax(logits / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    top_p = top_p.masked_fill(greedy, 1.0)
    if bool((top_p < 1).any()):
        logprobs = _nucleus(logprobs, top_p)
    cdf = logprobs.exp().cumsum(-1)
    total = cdf[:, -1]
    # Always below the total, so that the token has a probability above zero in spite of rounding.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if not bool(chosen.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: its weights are broken")
    return tokens, chosen


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most probable tokens, up to the one with which their sum reaches top_p."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    dropped = (before >= top_p[:, None]).scatter(1, order, before >= top_p[:, None])
    return log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)


def _prefill_chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows, sorted by the length of their prompts, in chunks of at most PREFILL_TOKENS."""
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
