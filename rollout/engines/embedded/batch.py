"""The rows that the embedded engine decodes together, and one step of sampling.

A row computes what it would compute alone, except for the rounding of the dtype (1e-15 in float64). Random
numbers depend on (seed, position) only, so a row draws the same tokens in any batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from rollout.counter_rng import uniforms
from rollout.engines.embedded.picture_input import ShownPicture
from rollout.engines.embedded.routes import Routes, routes_of

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
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a row too."""
    top_k: int = 0
    """The most likely tokens that are drawn from; 0: all tokens."""
    min_p: float = 0.0
    pictures: Sequence[tuple[ShownPicture, int]] = ()
    """The pictures of the prompt, each with the place of its first token."""
    skip_special: bool = True
    """Whether special tokens are left out of the text, also where stop strings are searched."""
    with_routes: bool = False
    """Whether the routes of its tokens are recorded."""
    future: "Future[list[SampleInProgress]]" = field(default_factory=Future)
    rows: "list[SampleInProgress]" = field(init=False)
    started: bool = False

    def __post_init__(self) -> None:
        self.rows = [SampleInProgress(self, j) for j in range(self.n)]


@dataclass(eq=False)
class SampleInProgress:
    """A sample that is being generated. `finish_reason` is None until it is finished."""

    generation: Generation
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or one of `stop_ids`, that has ended it; None: an end of sequence, or its length."""
    routes: list[NDArray[np.int16]] = field(default_factory=list)
    """(tokens, layers, experts of a token) of the prompt, then of each token that was drawn, but the last."""


class Batch(ABC):
    """The running rows and what the model remembers of them, in the same order. Only one thread may use it.

    How rows are put together is the subclass's: rows of any length in one call (PaddedBatch), or rows of
    equal length only (Cohorts).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rows: list[SampleInProgress] = []
        self._routes: Routes | None = None
        """Once a row asks for its routes."""
        self._set_row_tensors()

    @abstractmethod
    def join(self, rows: Sequence[SampleInProgress]) -> tuple[list[int], list[float]]:
        """Add new rows at the end of `rows`, in any order, and draw the first token of each. Returns token
        ids and log-probabilities, in the order of the rows. The caller goes on as after `step`.
        """

    @abstractmethod
    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these rows; the indices rise."""

    @abstractmethod
    def step(self) -> tuple[list[int], list[float]]:
        """Draw the next token of every row. Returns token ids and log-probabilities, in the order of `rows`.

        The caller appends them to the rows, and drops finished rows, before the next step.
        """

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, at temperature 1. The rows do not change."""
        ids = torch.tensor(token_ids)
        logprobs = log_softmax(self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double(), -1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()

    def _watch_routes(self, rows: Sequence[SampleInProgress]) -> None:
        """Record routes from now on if these rows, which will join, ask for theirs, and there are any."""
        if any(row.generation.with_routes for row in rows) and routes_of(self.model).layers:
            self._routes = routes_of(self.model)

    def _keep_routes(self, rows: Sequence[SampleInProgress], numbers: Sequence[int], columns: int) -> None:
        """Add the routes of the last call, of rows with so many columns, to what these rows have: `numbers`
        says which of the call's rows each is.
        """
        if self._routes is None:
            return
        routes = self._routes.chosen_experts
        routes = routes.reshape(-1, columns, *routes.shape[1:])
        for row, number in zip(rows, numbers, strict=True):
            if row.generation.with_routes:
                new = 1 if row.token_ids else len(row.generation.prompt_ids)
                row.routes.append(routes[number, columns - new :])

    def _draw(self, begin: int, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw the next token of the rows from `begin` on."""
        u = torch.from_numpy(uniforms(self._seeds[begin:], self._drawn[begin:]))
        logits, temperature = logits.double(), self._temperature[begin:]
        narrowed = self._top_p[begin:], self._top_k[begin:], self._min_p[begin:]
        tokens, logprobs = draw_tokens(logits, temperature, u, *narrowed)
        self._next[begin:] = tokens
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
        self._temperature = torch.tensor([g.temperature for g in generations], dtype=torch.float64)
        self._top_p = torch.tensor([g.top_p for g in generations], dtype=torch.float64)
        self._top_k = torch.tensor([g.top_k for g in generations], dtype=torch.int64)
        self._min_p = torch.tensor([g.min_p for g in generations], dtype=torch.float64)


def prefill_chunks(rows: Sequence[SampleInProgress]) -> Iterator[list[SampleInProgress]]:
    """The rows, sorted by the length of their prompts, in chunks of at most PREFILL_TOKENS."""
    chunk: list[SampleInProgress] = []
    prompts: set[Generation] = set()
    for row in sorted(rows, key=lambda row: len(row.generation.prompt_ids)):
        prompts.add(row.generation)
        if chunk and len(prompts) * len(row.generation.prompt_ids) > PREFILL_TOKENS:
            yield chunk
            chunk, prompts = [], {row.generation}
        chunk.append(row)
    if chunk:
        yield chunk


def draw_tokens(
    logits: Tensor, temperature: Tensor, u: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw token ids and log-probabilities, (B,) each, from logits (B, V) and per-row settings (B,), all
    float64 but top_k, which is int64.

    A row's token is the inverse of its cumulative distribution at u, in [0, 1). The log-probability is after
    temperature, min_p, top_k and top_p, which follow each other as in vLLM, i.e. in the distribution sampled
    from; of a greedy row it is the model's own (temperature 1). Raises FloatingPointError if the logits are
    not finite.
    """
    greedy = temperature < GREEDY_BELOW
    logprobs = log_softmax(logits / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    top_p, top_k, min_p = (
        setting.masked_fill(greedy, neutral) for setting, neutral in ((top_p, 1), (top_k, 0), (min_p, 0))
    )
    if bool((min_p > 0).any()):
        floor = logprobs.max(-1, keepdim=True).values + min_p[:, None].log()
        logprobs = log_softmax(logprobs.masked_fill(logprobs < floor, -torch.inf), dim=-1)
    if bool((top_k > 0).any()):
        logprobs = _likeliest(logprobs, top_k)
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


def _likeliest(logprobs: Tensor, top_k: Tensor) -> Tensor:
    """Keep each row's `top_k` most probable tokens, and those that are as probable as the last of them."""
    vocabulary = logprobs.shape[1]
    places = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    least = logprobs.sort(dim=-1, descending=True).values.gather(1, places[:, None])
    return log_softmax(logprobs.masked_fill(logprobs < least, -torch.inf), dim=-1)


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most probable tokens, up to the one with which their sum reaches top_p."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    dropped = (before >= top_p[:, None]).scatter(1, order, before >= top_p[:, None])
    return log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)
