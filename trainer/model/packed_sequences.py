"""Keep the sequences of a row apart.

What a model must be told is found out by trying (arrangement.py).

Restarting positions are enough where a family makes its mask from them. Where it does not, a mask for each
kind of attention layer is passed. Recurrent and convolution layers have no mask. Their kernels take bounds
of sequences, but their plain PyTorch code does not: there a row holds one sequence. The same masks let
several samples share their prompt, so that it is computed once (the idea is from Prefix Grouper, arXiv
2506.05433).
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rollout.engines.short_model import WINDOWS
from trainer.batch.packing import Microbatch
from trainer.model.attention import Kernel


class SequenceSeparation(Enum):
    """What a model gets to keep the sequences of a row apart, the cheapest first."""

    POSITIONS = "positions"
    """Positions that restart with each sequence, and no mask."""
    MASKS = "masks"
    """A mask for each kind of attention layer as well."""
    PICTURES = "masks of whole pictures"
    """Masks in which tokens of a picture see those behind them that are of it too (Gemma 3)."""
    KERNELS = "kernels"
    """The bounds of the sequences as well, which the kernels of recurrent layers take."""


UNMASKED = ("linear_attention", "conv")
"""Kinds of layers, as transformers names them, that take no attention mask."""


def decoder_inputs(
    microbatch: Microbatch,
    separation: SequenceSeparation,
    kernel: Kernel,
    config: Any,
    device: torch.device,
    divided: bool = False,
    is_picture: Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a transformers decoder for the microbatch's tokens, on `device`.

    With bounds, of SequenceSeparation.KERNELS or of the attention's `kernel`, the rows become one long row,
    because the kernels of recurrent layers take bounds within a single row. `config` must name the kernel's
    attention. `divided`: the model will see some of the columns, and can make no mask of them itself.
    `is_picture` (R, C): where features of pictures are.
    """
    positions = microbatch.position_ids
    is_packed = microbatch.is_packed
    needs_mask = microbatch.segments is not None or (
        (divided or (is_packed and separation is not SequenceSeparation.POSITIONS))
        and not kernel.takes_bounds
    )
    token_ids, segments = microbatch.token_ids, microbatch.segments
    inputs: dict[str, Any] = {}
    if kernel.takes_bounds or (is_packed and separation is SequenceSeparation.KERNELS and segments is None):
        token_ids, positions = token_ids.reshape(1, -1), positions.reshape(1, -1)
        inputs = _bounds(positions, device)
    inputs["input_ids"] = torch.from_numpy(token_ids).to(device)
    inputs["position_ids"] = torch.from_numpy(positions).to(device)
    if needs_mask:
        if segments is None:
            numbers = np.cumsum(positions == 0, axis=1)
            segments = np.stack([numbers, numbers])
        picture_tokens = is_picture if separation is SequenceSeparation.PICTURES else None
        inputs["attention_mask"] = attention_masks(
            torch.from_numpy(segments).to(device), inputs["position_ids"], config, picture_tokens
        )
    return inputs


def _bounds(positions: NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return the arguments of recurrent kernels, by transformers' names: (sequences + 1,) bounds, (1, C)
    numbers.
    """
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


def attention_masks(
    segments: Tensor, position_ids: Tensor, config: Any, picture_tokens: Tensor | None = None
) -> Any:
    """Return the mask that the model's attention takes, or a dict of them by kind of layer if it has kinds.

    `segments` (2, R, C): see Microbatch; `position_ids` (R, C). A mask is what transformers makes for the
    config's attention: (R, 1, C, C), boolean for sdpa and added for eager, or flex attention's BlockMask.
    `picture_tokens` (R, C): neighbours here see each other, also ahead.
    """
    segment, before = segments
    blocks = None if picture_tokens is None else _blocks(picture_tokens.to(position_ids.device))
    make = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]

    def mask(reaches: Callable[[Tensor, Tensor], Tensor] | None) -> Any:
        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            of_key = segment[row, key]
            visible = ((segment[row, query] == of_key) | (before[row, query] == of_key)) & (key <= query)
            if blocks is not None:
                visible = visible | ((blocks[row, query] == blocks[row, key]) & (blocks[row, query] > 0))
            if reaches is None:
                return visible
            return visible & reaches(position_ids[row, query], position_ids[row, key])

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


def _blocks(is_picture: Tensor) -> Tensor:
    """(R, C) numbers from 1 of the runs of `is_picture` in each row; elsewhere 0."""
    begins = is_picture.clone()
    begins[:, 1:] &= ~is_picture[:, :-1]
    return begins.cumsum(1) * is_picture
