"""Divide the columns of rows over neighbouring ranks, which share each sequence (Ulysses, arXiv 2309.14509).

The ranks of a context group get the same microbatches. Each computes a block of the columns; around the
attention they trade columns for heads and back, so that each computes all columns of some heads. The scores
of all blocks come together before the loss, which every rank computes whole: gradients of the parameters add
up over the ranks, and everything else is as for a tensor group. The attention is registered with transformers
under names of its own, so the code of no family is changed; a model that does anything else across columns is
found out by trying (Learner.arrange).
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.batch.packing import Microbatch
from trainer.model.attention import Kernel, KernelRefused
from trainer.model.parallel import Layout
from trainer.peers import waiting_for_peers


def divided(name: str) -> str:
    """Return the name of an attention of transformers where it is computed by a context group."""
    return f"flagpost_divided_{name}"


def register(layout: Layout) -> None:
    """Make known to transformers the attentions that this rank's context group computes."""
    for name in ("sdpa", "eager", *(kernel.registered for kernel in Kernel if kernel is not Kernel.OWN)):
        AttentionInterface.register(divided(name), partial(_attend, name, layout))
        AttentionMaskInterface.register(divided(name), ALL_MASK_ATTENTION_FUNCTIONS[name])


def padded(microbatch: Microbatch, size: int) -> Microbatch:
    """Return the microbatch with so many columns that `size` divides them: the last is repeated, unseen."""
    columns = microbatch.token_ids.shape[1]
    more = -columns % size

    def pad(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, more)], mode="edge")

    return replace(
        microbatch,
        token_ids=pad(microbatch.token_ids),
        position_ids=pad(microbatch.position_ids),
        segments=None if microbatch.segments is None else pad(microbatch.segments),
        scored_at=microbatch.scored_at + microbatch.scored_at // columns * more,
    )


def own_block(
    inputs: Mapping[str, Any], at: NDArray[np.int64], device: torch.device, layout: Layout
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return a decoder's inputs with this rank's columns only; where in them its scored tokens are, (n,); and
    which of Microbatch.scored_at, `at` (N,), they are, (n,). Masks and bounds, of the attention, stay whole.
    """
    columns = inputs["input_ids"].shape[1]
    width = columns // layout.context_parallel
    begin = layout.rank % layout.context_parallel * width
    row, column = at // columns, at % columns - begin
    index = np.flatnonzero((column >= 0) & (column < width))
    tokens = {name: inputs[name][:, begin : begin + width] for name in ("input_ids", "position_ids")}
    scored_at, index = (
        torch.from_numpy(array).to(device) for array in ((row * width + column)[index], index)
    )
    return {**inputs, **tokens}, scored_at, index


def joined(
    scores: tuple[Tensor, Tensor], index: Tensor, tokens: int, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the scores (N,) of all `tokens`, from each rank's own, (n,) each at `index` (n,). The gradient
    of a rank's scores is that of its own loss, which is the whole loss.
    """
    return _GatherScores.apply(layout.context_group, index, tokens, *scores)  # pyright: ignore[reportReturnType]


class _GatherScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, index: Tensor, tokens: int, *scores: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        all_scores = scores[0].new_zeros(len(scores), tokens)
        all_scores[:, index] = torch.stack(scores)
        with waiting_for_peers("joining the scores of a row's blocks"):
            dist.all_reduce(all_scores, group=group)
        return tuple(row.clone() for row in all_scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        (index,) = ctx.saved_tensors
        return None, None, None, *(gradient[index] for gradient in gradients)


def _attend(
    name: str,
    layout: Layout,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute the attention `name` of this rank's columns, together with its context group. Some families
    give the mask by its name.

    Take (rows, heads, own columns, size) tensors, and return a (rows, own columns, heads, size) one. Heads
    of keys that the group does not divide are repeated.
    """
    ranks, key_heads = layout.context_parallel, key.shape[1]
    if query.shape[1] % ranks:
        raise KernelRefused(f"a layer has {query.shape[1]} attention heads, which {ranks} does not divide")
    compute = (
        ALL_ATTENTION_FUNCTIONS.get(name) or sys.modules[type(module).__module__].eager_attention_forward
    )
    sinks = getattr(module, "sinks", None)
    if sinks is not None:  # (heads,)
        sinks = more["s_aux"] = sinks.chunk(ranks)[layout.rank % ranks]
    if key_heads % ranks:
        copies = math.lcm(key_heads, ranks) // key_heads
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    if sinks is not None or key_heads % ranks:
        groups = query.shape[1] // key.shape[1]
        causal = getattr(module, "is_causal", True)
        module = SimpleNamespace(training=False, is_causal=causal, num_key_value_groups=groups, sinks=sinks)
    of_heads = _AllToAll.apply(layout.context_group, ranks, query, key, value)
    out, *_ = compute(module, *of_heads, attention_mask, **more)
    return _AllToAll.apply(layout.context_group, ranks, out)[0], None  # pyright: ignore[reportOptionalSubscript]


class _AllToAll(torch.autograd.Function):
    """Each rank's part of dimension 1, joined over the ranks along dimension 2: of (rows, heads, columns,
    size) and of (rows, columns, heads, size) alike."""

    @staticmethod
    def forward(ctx: Any, group: Any, ranks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks = group, ranks
        return tuple(_trade(tensor, group, ranks, 1, 2) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return None, None, *(_trade(gradient, ctx.group, ctx.ranks, 2, 1) for gradient in gradients)


def _trade(tensor: Tensor, group: Any, ranks: int, split: int, join: int) -> Tensor:
    parts = torch.stack(tensor.chunk(ranks, split))
    received = torch.empty_like(parts)
    with waiting_for_peers("trading columns of a row for heads of the attention"):
        dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)
