"""Choose what computes the attention of a microbatch, and compute it by the bounds of the sequences.

For a row of several sequences transformers' own attention takes a dense mask, (rows, 1, columns, columns).
That keeps it off the fast kernels, and the pairs of tokens that the mask hides are computed. The attention
here is registered with transformers under names of its own, so the code of no family is changed.
arrangement.py tries it, and a model that needs what a kernel lacks keeps its own.
"""

from collections.abc import Callable, Collection
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flex_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Kernel(Enum):
    """What computes attention."""

    OWN = "own"
    """What transformers chose for the model: SDPA, or plain matrix products. It takes a dense mask."""
    SPLIT = "split"
    """A call of SDPA for each sequence. It takes bounds."""
    VARLEN = "varlen"
    """torch's varlen attention: flash kernels for GPUs. It takes bounds."""
    FLEX = "flex"
    """torch's flex attention, for GPUs: it takes any mask and leaves out its empty blocks."""

    @property
    def takes_bounds(self) -> bool:
        """Whether it takes the bounds of the sequences in place of a mask."""
        return self in (Kernel.SPLIT, Kernel.VARLEN)

    @property
    def registered(self) -> str:
        """The name under which transformers knows it, but for OWN."""
        return f"flagpost_{self.value}"


class KernelRefused(ValueError):
    """The model's attention needs what the kernel lacks."""


CANDIDATES = {"cuda": (Kernel.VARLEN, Kernel.FLEX), "cpu": (Kernel.SPLIT,)}
"""By type of device: the kernels to try beside OWN. On a CPU flex attention has no backward pass."""
SPLIT_FROM = 512
"""Columns of the rows from which SPLIT is faster than OWN on a CPU.

Measured on a Qwen3 of 4 layers, forwards and backwards, 2048 tokens, one thread, CPU time of OWN / SPLIT: up
to 192 columns 1.00 to 1.06; 256: 1.07 to 1.17; 512: 1.19 to 1.34; 1024: 1.45 to 1.61; 2048: 1.49 to 2.13,
the more sequences, the more. With two threads attention alone took up to 3 times as long up to 256 columns.
"""
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""The largest head that flash kernels take, and the number that its size must be a multiple of."""
HALF = (torch.float16, torch.bfloat16)
TRIED_WINDOW, TOLERANCE, SAID = 6, 0.05, 120
"""Tokens that a token sees; the error allowed in bfloat16; characters of an error that are said."""
FLEX_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
"""By itself torch takes another kernel below 128 columns, and finds none where these times the query heads of
a key head are more than 128: with four (Qwen3-4B, Llama 3) flex seemed not to work at all on an H100."""
LACKING = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "cap of the scores",
    "position_bias": "biases by position",
    "indices": "choice of tokens",
    "block_indices": "choice of blocks",
}
"""Arguments of transformers' attention that SPLIT and VARLEN do not have."""


def candidates(model: Any, device: torch.device) -> list[Kernel]:
    """Return the kernels to try for a transformers model: none if its attention cannot be exchanged."""
    if not model._can_set_attn_implementation():
        return []
    if device.type == "cuda":  # a window, or rows, more than its 8 would leave flex without its kernels
        torch._dynamo.config.recompile_limit = 64
    kernels = CANDIDATES.get(device.type, ())
    return [kernel for kernel in kernels if kernel is not Kernel.FLEX or model._supports_flex_attn]


def choose_kernel(
    device: str, works: Collection[Kernel], *, shared: bool, several: bool, columns: int
) -> Kernel:
    """Return the kernel for a microbatch's attention.

    `device`: its type. `works`: the kernels that compute this model's attention. `shared`: prompts are
    shared, which bounds cannot say. `several`: a row holds several sequences. `columns`: tokens of a row.
    """
    if device == "cpu":
        order = [Kernel.SPLIT] if several and not shared and columns >= SPLIT_FROM else []
    else:
        order = [Kernel.FLEX] if shared else [Kernel.VARLEN, Kernel.FLEX]
    return next((kernel for kernel in order if kernel in works), Kernel.OWN)


def refusal(dtype: torch.dtype, head_dim: int, value_dim: int) -> str:
    """Return why flash kernels do not take heads of so many numbers; empty if they do."""
    if dtype not in HALF:
        return f"it takes float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim != value_dim:
        return f"heads have {head_dim} numbers for queries and {value_dim} for values; it takes equal ones"
    if head_dim % HEAD_MULTIPLE or head_dim > LARGEST_HEAD:
        return f"heads have {head_dim} numbers; it takes multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
    return ""


def failure(kernel: Kernel, config: Any, ranks: int, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernel cannot compute attention and its gradients on this device; empty if it can.

    It is compared with SDPA on random sequences and a window, with the heads of the model's `config` that one
    of `ranks` tensor-parallel ranks has. This computes nothing together with other ranks.
    """
    try:
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        error = _largest_error(kernel, heads // ranks, key_heads // ranks, head_dim, device, dtype)
    except Exception as error:  # drivers, compilers, kernels and configurations fail in any way
        return brief(error)
    return "" if error < TOLERANCE else f"it is wrong by {error:.1e} of the largest value"


@torch.enable_grad()
def _largest_error(
    kernel: Kernel, heads: int, key_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest error of the attention of random sequences and of its gradients, as a fraction."""
    lengths = torch.tensor([24, 1, 16], device=device)
    sequences = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    columns = torch.arange(len(sequences), device=device)

    def sees(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sequences[query] == sequences[key]) & (key <= query) & (query - key < TRIED_WINDOW)

    generator = torch.Generator().manual_seed(0)
    sizes = [(1, count, len(sequences), head_dim) for count in (heads, key_heads, key_heads, heads)]
    *leaves, weights = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    for leaf in leaves:
        leaf.requires_grad_()
    visible = sees(columns, columns, columns[:, None], columns)
    dense = F.scaled_dot_product_attention(*leaves, attn_mask=visible, enable_gqa=True)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[kernel.registered]
    mask = make_mask(
        batch_size=1, q_length=len(sequences), kv_length=len(sequences), mask_function=sees, device=device
    )
    options: dict[str, Any] = {"sliding_window": TRIED_WINDOW}
    if kernel.takes_bounds:
        options |= {
            "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0)).int(),
            "max_length_q": int(lengths.max()),
        }
    module = SimpleNamespace(training=False, is_causal=True)
    actual = ALL_ATTENTION_FUNCTIONS[kernel.registered](module, *leaves, mask, **options)[0].transpose(1, 2)
    pairs = zip(*([out, *torch.autograd.grad(out, leaves, weights)] for out in (actual, dense)), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def brief(error: Exception) -> str:
    """Return an error in one short line."""
    name = "" if isinstance(error, KernelRefused) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())[:SAID]


def split_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    _cu_seq_k: Tensor,
    _max_q: int,
    _max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute what varlen_attn does, with a call of SDPA for each sequence; see there for the shapes."""
    lengths = cu_seq_q.diff().tolist()
    split = (tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value))
    pieces: list[Tensor] = []
    for length, q, k, v in zip(lengths, *split, strict=True):
        before, mask = window_size[0], None
        if 0 <= before < length - 1:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(-before)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def _varlen(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **more: Any) -> Tensor:
    reason = refusal(query.dtype, query.shape[-1], value.shape[-1])
    if reason:
        raise KernelRefused(reason)
    return varlen_attn(query, key, value, *bounds, **more)  # pyright: ignore[reportReturnType]


def _by_bounds(compute: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Return `compute`, which has the signature of varlen_attn, as an attention of transformers."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int = 0,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Take (rows, heads, columns, size) tensors, and return a (rows, columns, heads, size) one.

        `cu_seq_lens_q`: bounds of the sequences in the flattened rows, from the model's keyword arguments.
        `sliding_window`: how many tokens a token sees, itself included.
        """
        for name, feature in LACKING.items():
            if more.get(name) is not None:
                raise KernelRefused(f"it has no {feature}")
        if cu_seq_lens_q is None or attention_mask is not None:
            raise KernelRefused("bounds of the sequences do not reach the attention, or a mask does")
        if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise KernelRefused("it is causal and has no dropout")
        rows, heads, columns, _ = query.shape
        tensors = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = compute(
            *tensors,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(sliding_window - 1 if sliding_window else -1, 0),
            enable_gqa=key.shape[1] != heads,
        )
        return out.unflatten(0, (rows, columns)), None

    return attend


def _no_mask(**_: Any) -> None:
    """Return the mask of an attention that takes bounds."""


def _flex(*inputs: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
    return flex_attention_forward(*inputs, **more, kernel_options=FLEX_OPTIONS)


for _kernel, _attend, _mask in (
    (Kernel.SPLIT, _by_bounds(split_attn), _no_mask),
    (Kernel.VARLEN, _by_bounds(_varlen), _no_mask),
    (Kernel.FLEX, _flex, flex_attention_mask),
):
    AttentionInterface.register(_kernel.registered, _attend)
    AttentionMaskInterface.register(_kernel.registered, _mask)
