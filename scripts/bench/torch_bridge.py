"""Give torch 2.11 what Flagpost needs of a newer torch, as far as one GPU needs it. Import it first.

For training jobs over processes there is older_torch/sitecustomize.py besides.
"""

import inspect
from typing import Any

import torch.nn.attention.varlen as varlen
from torch.distributed.fsdp import FSDPModule

lacking: Any = FSDPModule
if not hasattr(lacking, "set_reduce_scatter_unused_params"):  # of experts that were idle on this rank alone
    lacking.set_reduce_scatter_unused_params = lambda _self, _do: None

compute: Any = varlen.varlen_attn
if "enable_gqa" not in inspect.signature(compute).parameters:  # its kernel groups queries without being asked
    patched: Any = varlen
    patched.varlen_attn = lambda *bounds, enable_gqa=False, **more: compute(*bounds, **more)
