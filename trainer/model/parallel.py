"""Lay a model out over the ranks: each holds all of it, or a shard (FSDP2, and tensor parallelism), of one
model over all nodes or of one on each.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from trainer.peers import waiting_for_peers
from trainer.settings import TrainerSettings

GRADIENTS_ADD_UP = "replicated_with_grad_allreduce"
"""Style of a norm over heads: every rank has the whole weight, but only its own heads."""
WHOLE = "embedding_rowwise"
"""Style of embeddings, which stay whole here: the plans of some versions split them if the head is tied to
them."""
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
}
"""The styles that a model's own `base_model_tp_plan` may ask for, beside GRADIENTS_ADD_UP and WHOLE."""


class LayoutError(ValueError):
    """The settings ask for a layout that these processes or this model cannot have."""


@dataclass(frozen=True)
class Layout:
    """How this process takes part in training; alone by default."""

    rank: int = 0
    world_size: int = 1
    tensor_parallel_size: int = 1
    """Neighbouring ranks that share each layer and get the same microbatches."""
    sharded: bool = False
    mesh: DeviceMesh | None = None
    """If sharded: the dimensions "nodes", if each of several holds a whole model, "data" and, with
    tensor_parallel_size > 1, "tensor"."""
    nodes: int = 1
    """How many nodes hold a whole model, each of them sharded over its ranks."""
    context_parallel: int = 1
    """Neighbouring ranks that share each sequence and get the same microbatches; see model.context."""
    context_group: dist.ProcessGroup | None = None
    """The process group of these ranks; None without context parallelism."""

    @property
    def group_size(self) -> int:
        """How many neighbouring ranks get the same microbatches."""
        return self.tensor_parallel_size * self.context_parallel

    @property
    def data_rank(self) -> int:
        """This rank's place among the ranks that get different microbatches."""
        return self.rank // self.group_size

    @property
    def node(self) -> int:
        """This rank's place among the `nodes`."""
        return self.rank * self.nodes // self.world_size

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """This rank and those on other nodes that hold the same weights; None: no other does."""
        if self.sharded:
            return self.mesh["nodes"].get_group() if self.mesh is not None and self.nodes > 1 else None
        return dist.group.WORLD if self.world_size > 1 else None

    def data_weights(self, rank_weights: Sequence[float]) -> list[float]:
        """(shares,) weights from one weight per global rank: ranks with the same microbatches have a sum."""
        if len(rank_weights) != self.world_size:
            raise LayoutError(f"{len(rank_weights)} rank weights for {self.world_size} ranks; give one each")
        size = self.group_size
        return [sum(rank_weights[k : k + size]) for k in range(0, self.world_size, size)]

    @staticmethod
    def choose(parameters: int, settings: TrainerSettings, device: torch.device) -> "Layout":
        """Choose the layout of a model with so many parameters, over the process group if there is one.

        All ranks call this alike. Raises LayoutError.
        """
        grouped = dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        large = world_size > 1 and parameters >= settings.shard_from_parameters
        sharded = settings.layout in ("sharded", "hybrid") or (settings.shards_by_size and large)
        size = settings.tensor_parallel_size
        if size > 1 and settings.layout == "auto":
            sharded = True
        if sharded and not grouped:
            raise LayoutError(
                f"trainer.layout={settings.layout} needs a process group; start training with torchrun"
            )
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        for name in ("tensor_parallel_size", "context_parallel"):
            ranks = getattr(settings, name)
            if on_node % ranks or world_size % ranks:
                raise LayoutError(
                    f"trainer.{name}={ranks} does not divide the {on_node} training processes of this node "
                    f"(of {world_size} in all); choose a divisor, or trainer.processes_per_node"
                )
        layout = Layout(rank, world_size)
        if (ranks := settings.context_parallel) > 1:
            timeout = timedelta(seconds=settings.collective_timeout_s)
            group, _ = dist.new_subgroups(ranks, timeout=timeout)
            layout = replace(layout, context_parallel=ranks, context_group=group)
        if not sharded:
            return layout
        nodes = _equal_nodes(on_node, world_size) if settings.layout == "hybrid" else 1
        # "tensor" innermost: ranks of a node are neighbours.
        sizes = {"nodes": nodes, "data": world_size // nodes // size, "tensor": size}
        sizes = {name: count for name, count in sizes.items() if count > 1 or name == "data"}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name in sizes:  # torch gives new groups a timeout of its own
            _set_pg_timeout(timedelta(seconds=settings.collective_timeout_s), mesh.get_group(name))
        return replace(layout, tensor_parallel_size=size, sharded=True, mesh=mesh, nodes=nodes)


def _equal_nodes(on_node: int, world_size: int) -> int:
    """Return how many nodes there are, all with `on_node` ranks. Collective. LayoutError if they differ."""
    bounds = torch.tensor([-on_node, on_node])
    with waiting_for_peers("comparing the training processes of the nodes"):
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
    fewest, most = -int(bounds[0]), int(bounds[1])
    if fewest < most:
        raise LayoutError(
            f"trainer.layout=hybrid: nodes have {fewest} to {most} training processes, and each is to hold a "
            "whole model in the same parts; take trainer.layout=sharded, or trainer.processes_per_node"
        )
    return world_size // on_node


def shard(root: nn.Module, model: Any, layout: Layout, settings: TrainerSettings, on_gpu: bool) -> None:
    """Shard `model`, which `root` wraps and calls, over the layout's mesh. Its parameters may be on meta.

    Gradients are added up over the data ranks, not averaged: the loss is divided by the step's totals.
    """
    mesh = layout.mesh
    assert mesh is not None
    layers = decoder_layers(model)
    if layout.tensor_parallel_size > 1:
        parallelize_module(planned_module(model), mesh["tensor"], _tensor_plan(model, layout))
    param_dtype = getattr(torch, settings.computes_in(on_gpu))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if settings.cpu_offload and on_gpu else OffloadPolicy()
    if settings.activation_checkpointing:  # inside FSDP's hooks, so that recomputing gathers nothing twice
        checkpoint_layers(layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy, offload_policy=offload)
    # Beside token ids the root gets temperatures, which must not be rounded.
    exact = replace(policy, cast_forward_inputs=False)
    fully_shard(root, mesh=mesh["data"], mp_policy=exact, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            if mesh["data"].size() > 1:  # alone there is nothing to divide, but FSDP would make room for it
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # Experts may be idle on one rank and not on another.
    root.set_reduce_scatter_unused_params(True)  # pyright: ignore[reportCallIssue], fully_shard made it one


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Have each layer keep its input alone, and be computed again in the backward pass."""
    for layer in layers:  # without dropout, so without random state
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers that transformers keeps whole, outermost ones only."""
    names = set(_base(model)._no_split_modules or ())
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        name_of_class = type(module).__name__.removeprefix("FSDP")  # which fully_shard puts before it
        if name_of_class in names and not inside:
            layers[name] = module
    return list(layers.values())


def reshard(root: nn.Module) -> None:
    """Let go of whole weights that FSDP has kept of a sharded module and its layers."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def partial_parameters(model: Any, layout: Layout) -> list[Tensor]:
    """Return the parameters whose gradients must still be added up over the tensor group."""
    if layout.tensor_parallel_size == 1:
        return []
    base = _base(model)
    plan = base.config.get_text_config().base_model_tp_plan
    patterns = {pattern for pattern, style in plan.items() if style == GRADIENTS_ADD_UP}
    return [
        parameter
        for name, parameter in planned_module(model).named_parameters()
        if parameter.requires_grad and _generic(name.rpartition(".")[0]) in patterns
    ]


def add_up_partial(parameters: Sequence[Tensor], layout: Layout) -> None:
    """Add up the gradients of partial_parameters, in one call."""
    if not parameters:
        return
    assert layout.mesh is not None
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=layout.mesh["tensor"].get_group())
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, total in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(total.view_as(gradient))


def add_up_over_nodes(gradients: Iterable[Tensor], layout: Layout, device: torch.device) -> None:
    """Add up the gradients of nodes that hold a whole model each: once a step, as those of its microbatches
    are added up on each node.
    """
    for gradient in gradients:  # of all parameters: FSDP makes those of experts that a node has not asked
        _with_copies(local_part(gradient), layout, device, dist.all_reduce)


def take_over_first(parameter: Tensor, layout: Layout, device: torch.device) -> None:
    """Make this rank's part of the parameter what the first of its copies has."""
    _with_copies(local_part(parameter), layout, device, partial(dist.broadcast, group_src=0))


def _with_copies(part: Tensor, layout: Layout, device: torch.device, call: Callable[..., Any]) -> None:
    """Change a tensor in place by a collective call of all copies. In host memory it comes to `device`."""
    value = part.to(device)
    call(value, group=layout.copies)
    if value is not part:
        part.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm_share(tensor: Tensor, world_size: int) -> Tensor:
    """This rank's share of the squared norm. The shares of all ranks add up to it; copies count once."""
    square = torch.linalg.vector_norm(local_part(tensor)).square()
    if not isinstance(tensor, DTensor):
        return square / world_size
    mesh, placements = tensor.device_mesh, tensor.placements
    shards = prod(mesh.size(k) for k, placement in enumerate(placements) if not placement.is_replicate())
    return square * (shards / world_size)


def _base(model: Any) -> Any:
    """Return the transformers model, out of peft's wrapper if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def planned_module(model: Any) -> Any:
    """Return the module whose parts a tensor-parallel plan names: beside a vision tower the decoder alone."""
    base = _base(model)
    return base.get_decoder() if hasattr(base.base_model, "get_image_features") else base.base_model


def _generic(name: str) -> str:
    """Layer numbers as `*`, the way plans are written."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _tensor_plan(model: Any, layout: Layout) -> dict[str, ParallelStyle]:
    """Return the model's own plan for its decoder, in torch's styles; raises LayoutError."""
    base, size = _base(model), layout.tensor_parallel_size
    config = base.config.get_text_config()
    setting = f"trainer.tensor_parallel_size={size} and {type(base).__name__}"
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise LayoutError(f"{setting}: transformers has no tensor-parallel plan for it; use 1")
    unknown = sorted({style for style in plan.values()} - {*STYLES, GRADIENTS_ADD_UP, WHOLE})
    if unknown:
        raise LayoutError(f"{setting}: its plan asks for {', '.join(unknown)}, which is not there; use 1")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            raise LayoutError(f"{setting}: it has {name}={number}; choose a size that divides it")
    return {pattern: STYLES[style] for pattern, style in plan.items() if style in STYLES}
