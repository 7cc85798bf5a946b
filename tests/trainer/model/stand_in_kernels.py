"""Packs sequences of models whose recurrent layers have kernels: `python stand_in_kernels.py FAMILY ...`.

The kernels are stand-ins under the names of the real packages, which need a GPU. Each takes the bounds of
sequences as the real one does, cuts the row there, and calls what transformers has in plain PyTorch on the
pieces. Prints, for each family, what keeps sequences apart and the largest error of a logprob.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Any = None
) -> Tensor:
    """(1, channels, C) -> the same shape; `seq_idx` (1, C) int32."""

    def convolve(piece: Tensor) -> Tensor:
        width = weight.shape[-1]
        padded = torch.nn.functional.pad(piece, (width - 1, 0))
        out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
        return torch.nn.functional.silu(out) if activation else out

    if seq_idx is None:
        return convolve(x)
    assert x.shape[0] == 1 and seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[::2]
    lengths = torch.bincount(seq_idx[0]).tolist()
    return torch.cat([convolve(piece) for piece in x.split(lengths, dim=2)], dim=2)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Tensor, None]:
    """(1, C, heads, width) each -> values of that shape; `cu_seqlens` (sequences + 1,) int32."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    plain = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
    lengths = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    assert cu_seqlens is None or (query.shape[0] == 1 and cu_seqlens.dtype == torch.int32)
    pieces = zip(*(part.split(lengths, dim=1) for part in (query, key, value, g, beta)), strict=True)
    return torch.cat(
        [plain(*piece, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0] for piece in pieces], dim=1
    ), None


def install(package: str, *functions: Any) -> None:
    """Make a module of these functions that can be imported and found."""
    module = ModuleType(package)
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(package, None)
    for function in functions:
        setattr(module, function.__name__, function)
    sys.modules[package] = module


def main() -> None:
    """Install the stand-ins, then try the families."""
    install("causal_conv1d", causal_conv1d_fn)
    install("fla", chunk_gated_delta_rule)
    from scripts.tiny_models import make_batch
    from tests.trainer.model import test_packed_sequences as tests

    torch.set_num_threads(1)
    batch = make_batch()
    for family in sys.argv[1:]:
        learner = tests.learner_of(family)
        plan = tests.planned(learner, batch) + tests.packed_tight(batch)
        print(tests.found(learner)[0], tests.error(learner, batch, plan))


if __name__ == "__main__":
    main()
