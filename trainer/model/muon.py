"""Muon for the matrices of layers, AdamW for everything else."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from trainer.model.parallel import LayoutError, decoder_layers, local_part
from trainer.peers import waiting_for_peers

ADAMW_STATE = ("exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial whose iteration makes all singular values about 1."""
ITERATIONS = 5
LEAST_NORM = 1e-7


class MuonAndAdamW(AdamW):
    """AdamW, but for groups of matrices that have `is_muon`: they take steps of Muon (Jordan 2024,
    kellerjordan.github.io/posts/muon), as torch.optim.Muon takes them with adjust_lr_fn="match_rms_adamw".

    M <- 0.95 M + 0.05 G; W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) orthogonal(0.05 G + 0.95 M).
    The factor gives steps the size of AdamW's, so learning rate and decay carry over (Moonlight, arXiv
    2502.16982, section 2.2). Of a sharded matrix every rank gathers the whole, since only that can be made
    orthogonal, and takes its part of the step: all ranks call this together.
    """

    def step(self, closure: None = None) -> None:
        """Take a step of each parameter that has a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["is_muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group["is_muon"] else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)

    @torch.no_grad()
    def _step_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights, gradient = local_part(parameter), local_part(gradient)
        momentum = local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(_whole(gradient.lerp(momentum, MOMENTUM).bfloat16(), parameter))
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(_part(update, parameter), alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T in bfloat16, by Newton-Schulz: singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def _whole(part: Tensor, like: Tensor) -> Tensor:
    """Return the whole matrix of which `part` is what this rank has, on the device that computes."""
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
    part = part.to(mesh.device_type)  # with trainer.cpu_offload it is in host memory
    sharded = DTensor.from_local(part, mesh, like.placements, shape=like.shape, stride=like.stride())
    with waiting_for_peers("gathering a matrix for Muon"):
        return sharded.full_tensor()


def _part(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole matrix that this rank has."""
    if not isinstance(like, DTensor):
        return full
    [chunk] = like.__create_chunk_list__()
    ranges = zip(chunk.offsets, chunk.sizes, strict=True)
    return full[tuple(slice(begin, begin + size) for begin, size in ranges)].to(local_part(like).device)


def layer_matrices(model: Any) -> set[int]:
    """Return the ids of the trained matrices in the model's layers. Experts that are one tensor of three
    dimensions are none. Raises LayoutError if there are none.
    """
    parameters: Iterable[Tensor] = (p for layer in decoder_layers(model) for p in layer.parameters())
    ids = {id(parameter) for parameter in parameters if parameter.requires_grad and parameter.ndim == 2}
    if not ids:
        raise LayoutError("trainer.optimizer=muon: the model's layers have no matrices to train; use adamw")
    return ids
