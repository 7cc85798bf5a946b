"""Rows of equal length in one call of the model, for models that padded rows would mislead.

Recurrent and convolution layers read the padding, whatever the mask says. Rows of equal length need none, and
then the model's own cache is right: it is used as transformers' `generate` uses it. It costs a call for each
length among the rows.
"""

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rollout.engines.embedded.batch import Batch, SampleInProgress, prefill_chunks


@dataclass
class _Cohort:
    """Rows that joined together with prompts of one length, so that they have one length for ever."""

    rows: list[SampleInProgress]
    cache: Cache | None
    """What the model remembers of the rows, in their order. None: it computes the whole rows anew."""


class Cohorts(Batch):
    """The running rows, cohort after cohort. Without `cached` each step computes the whole rows anew: for a
    model whose cache cannot be used.
    """

    def __init__(self, model: PreTrainedModel, *, cached: bool = True) -> None:
        super().__init__(model)
        self.is_cached = cached
        self._arguments = inspect.signature(model.forward).parameters.keys()
        self._cache_name = "cache_params" if "cache_params" in self._arguments else "past_key_values"
        self._cohorts: list[_Cohort] = []

    def join(self, rows: Sequence[SampleInProgress]) -> tuple[list[int], list[float]]:
        begin, logits = len(self.rows), list[Tensor]()
        groups = [
            list(group)
            for chunk in prefill_chunks(rows)  # sorted by length
            for _, group in itertools.groupby(chunk, key=lambda row: len(row.generation.prompt_ids))
        ]
        self._watch_routes(rows)
        self.rows += itertools.chain(*groups)  # first, so that these requests fail too if the model fails
        for group in groups:
            generations = list(dict.fromkeys(row.generation for row in group))
            last, cache = self._forward(torch.tensor([g.prompt_ids for g in generations]), None)
            # Each prompt is computed once for all its rows.
            number_of = {generation: g for g, generation in enumerate(generations)}
            numbers = [number_of[row.generation] for row in group]
            self._keep_routes(group, numbers, len(generations[0].prompt_ids))
            prompt_of = torch.tensor(numbers)
            logits.append(last[prompt_of])
            self._cohorts.append(_Cohort(group, cache))
            _select(cache, prompt_of)
        self._set_row_tensors()
        return self._draw(begin, torch.cat(logits))

    def keep(self, indices: Sequence[int]) -> None:
        staying = set(indices)
        self.rows = [self.rows[i] for i in indices]
        numbers, cohorts = itertools.count(), list[_Cohort]()
        for cohort in self._cohorts:
            rows = [
                j for j, number in zip(range(len(cohort.rows)), numbers, strict=False) if number in staying
            ]
            if rows and len(rows) < len(cohort.rows):
                cohort.rows = [cohort.rows[j] for j in rows]
                _select(cohort.cache, torch.tensor(rows))
            cohorts += [cohort] if rows else []
        self._cohorts = cohorts
        self._set_row_tensors()

    def step(self) -> tuple[list[int], list[float]]:
        logits, begin = list[Tensor](), 0
        for cohort in self._cohorts:
            end = begin + len(cohort.rows)
            columns = 1
            if cohort.cache is None:
                ids = torch.tensor([row.generation.prompt_ids + row.token_ids for row in cohort.rows])
                columns = ids.shape[1]
                last, _ = self._forward(ids, None)
            else:
                first = cohort.rows[0]
                known = len(first.generation.prompt_ids) + len(first.token_ids) - 1
                last, cohort.cache = self._forward(self._next[begin:end, None], cohort.cache, known)
            self._keep_routes(cohort.rows, range(len(cohort.rows)), columns)
            logits.append(last)
            begin = end
        return self._draw(0, torch.cat(logits))

    def _forward(self, ids: Tensor, cache: Cache | None, known: int = 0) -> tuple[Tensor, Cache | None]:
        """Return the last logits (B, V) of ids (B, L), which follow `known` tokens in the cache; the cache
        then.
        """
        options: dict[str, Any] = {
            "position_ids": torch.arange(known, known + ids.shape[1]).expand(len(ids), -1),
            "logits_to_keep": 1,
        }
        keywords = {name: value for name, value in options.items() if name in self._arguments}
        if cache is not None:
            keywords[self._cache_name] = cache
        output: Any = self.model(input_ids=ids, use_cache=self.is_cached, **keywords)
        return output.logits[:, -1], output[self._cache_name] if self.is_cached else None


def _select(cache: Any, rows: Tensor) -> None:
    """Make these rows, (B,) numbers in any order, the rows of the cache, if there is one."""
    if cache is None:
        return
    if type(cache).batch_select_indices is not Cache.batch_select_indices:
        cache.batch_select_indices(rows)  # a family's own cache, which holds more than the layers do
    else:
        cache.reorder_cache(rows)  # which linear attention has too
