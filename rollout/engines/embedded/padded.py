"""Rows of any length in one call of the model: left-padded, with one key-value cache.

The attention mask hides the padding, and positions count from a row's own first token. This is right only
for models whose layers remember nothing but keys and values; batch_choice.py finds out.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from rollout.engines.embedded.batch import Batch, SampleInProgress, prefill_chunks
from rollout.engines.embedded.picture_input import PlacedPictures, ShownPicture, with_pictures


class PaddedBatch(Batch):
    """The running rows, and their cache in the same order."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._clear()

    def join(self, rows: Sequence[SampleInProgress]) -> tuple[list[int], list[float]]:
        begin, logits = len(self.rows), list[Tensor]()
        chunks = list(prefill_chunks(rows))
        self._watch_routes(rows)
        self.rows += itertools.chain(*chunks)  # first, so that these requests fail too if the model fails
        for chunk in chunks:
            cache, mask, positions, last = self._prefill(chunk)
            logits.append(last)
            self._positions = torch.cat([self._positions, positions])
            if len(self._mask):
                length = max(mask.shape[1], self._mask.shape[1])
                for layer, joining in zip(_layers(self._cache), _layers(cache), strict=True):
                    layer.keys = torch.cat([_pad_left(layer.keys, length), _pad_left(joining.keys, length)])
                    layer.values = torch.cat(
                        [_pad_left(layer.values, length), _pad_left(joining.values, length)]
                    )
                missing = [length - self._mask.shape[1], length - mask.shape[1]]
                self._mask = torch.cat([pad(self._mask, (missing[0], 0)), pad(mask, (missing[1], 0))])
            else:
                self._cache, self._mask = cache, mask
        self._set_row_tensors()
        return self._draw(begin, torch.cat(logits))

    def keep(self, indices: Sequence[int]) -> None:
        self.rows = [self.rows[i] for i in indices]
        if not self.rows:
            self._clear()
            return
        rows = torch.tensor(indices)
        mask, self._positions = self._mask[rows], self._positions[rows]
        first = int(mask.any(0).int().argmax())  # the columns before are padding in all of them
        for layer in _layers(self._cache):
            layer.keys = layer.keys[rows, :, first:]
            layer.values = layer.values[rows, :, first:]
        self._mask = mask[:, first:]
        self._set_row_tensors()

    def step(self) -> tuple[list[int], list[float]]:
        self._mask = pad(self._mask, (0, 1), value=1)
        output = self.model(
            input_ids=self._next[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        self._keep_routes(self.rows, range(len(self.rows)), 1)
        return self._draw(0, output.logits[:, -1])

    def _prefill(self, rows: Sequence[SampleInProgress]) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Cache and mask of the rows' prompts, the position of the token behind each (rows,), and the last
        logits (rows, V). Each prompt is computed once for all its rows.
        """
        number_of = {
            generation: g for g, generation in enumerate(dict.fromkeys(row.generation for row in rows))
        }
        width = max(len(generation.prompt_ids) for generation in number_of)
        ids = torch.zeros(len(number_of), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        shown: list[tuple[ShownPicture, int]] = []
        for generation, g in number_of.items():
            begin = width - len(generation.prompt_ids)
            ids[g, begin:] = torch.tensor(generation.prompt_ids, dtype=torch.long)
            mask[g, begin:] = 1
            shown += [(picture, g * width + begin + at) for picture, at in generation.pictures]
        cache = DynamicCache()
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        with with_pictures(self.model.base_model, inputs, PlacedPictures(shown), self.model.dtype) as inputs:
            output = self.model(
                **inputs, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        positions = inputs["position_ids"]
        if positions.ndim == 3:  # the first are not those by which tokens are told where they are
            positions = positions[1:].amax(0)
        numbers = [number_of[row.generation] for row in rows]
        self._keep_routes(rows, numbers, width)
        cache_rows = torch.tensor(numbers)
        for layer in _layers(cache):
            layer.keys, layer.values = layer.keys[cache_rows], layer.values[cache_rows]
        return cache, mask[cache_rows], positions[cache_rows].amax(1) + 1, output.logits[cache_rows, -1]

    def _clear(self) -> None:
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)  # (rows, length), 1 where there is a token
        self._positions = torch.zeros(0, dtype=torch.long)  # (rows,) of the next token
        self._set_row_tensors()


def _layers(cache: DynamicCache) -> list[Any]:
    """Return the layers; `keys` and `values` of each: (rows, heads, length, head_dim)."""
    return cache.layers


def _pad_left(states: Tensor, length: int) -> Tensor:
    """(rows, heads, L, head_dim) -> (rows, heads, length, head_dim), zeros in front."""
    return pad(states, (0, 0, length - states.shape[2], 0))
