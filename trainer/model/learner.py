"""The policy in training: master weights, the sums of a step over the ranks, the optimizer."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rollout.engines.embedded.routes import routes_of
from rollout.storage.hashing import FileFacts
from trainer.model import parallel
from trainer.model.host_memory import HostMemory
from trainer.model.loading import build_scorer, count_parameters, model_directory
from trainer.model.muon import MuonAndAdamW, layer_matrices
from trainer.model.parallel import Layout, LayoutError
from trainer.model.policy import ALONE, Policy
from trainer.model.quantised import Quantised
from trainer.model.token_logprobs import Scorer
from trainer.peers import waiting_for_peers
from trainer.progress import SILENT, Progress
from trainer.settings import TrainerSettings
from trainer.statistics import SUMS


class Learner(Policy):
    """Keeps between training phases: fp32 master weights, the optimizer's, the number of steps taken.

    If the model is replicated, the gradients of all parameters are views of one flat tensor, which has room
    for a step's statistics too, so one call adds up everything over the ranks. If it is sharded, FSDP adds up
    the gradients as they come, and each rank keeps its shard's; where each node has a whole model, they are
    added up over the nodes at the end.
    """

    def __init__(self, scorer: Scorer, layout: Layout = ALONE, optimizer: str = "adamw") -> None:
        """`scorer` holds float32 parameters in the layout, on the device that trains them."""
        super().__init__(scorer, layout)
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        """The trained parameters by the model's own names, tied ones once; DTensors if sharded."""
        matrices = layer_matrices(self.model) if optimizer == "muon" else set[int]()
        kind = MuonAndAdamW if optimizer == "muon" else AdamW
        self.optimizer = kind(_decay_groups(self.parameters, matrices), fused=True)
        self.optimizer_step = 0
        self.entropy_control: tuple[float, float] | None = None
        """With trainer.entropy_target: the bonus of the next step, and the entropy of the last one."""
        self.written: dict[str, dict[str, Tensor]] = {}
        """What the files of weights hold that this rank has written last, by name, for deltas to them."""
        self.frozen_file: FileFacts | None = None
        """The file of weights that no step changes, in the policy that the next step begins with; None: it
        has none, or another one."""
        self.frozen_sums: dict[str, int] | None = None
        """The sums of the tensors of that file, once they are known."""
        self.saved_as: dict[torch.dtype, Any] = {}
        """What checkpoint.hub_files has found out about writing its weights, by their dtype."""
        self._partial = parallel.partial_parameters(self.model, layout)
        self._on_host = False
        self._host = HostMemory()
        self._make_room()

    def _make_room(self) -> None:
        """Tensors for a step's sums: statistics, and the gradients where replicated."""
        sizes = [] if self.layout.sharded else [p.numel() for p in self.parameters.values()]
        self.summed = torch.zeros(sum(sizes) + len(SUMS), device=self.device)
        self.gradients, self.sums = self.summed.split([sum(sizes), len(SUMS)])
        if sizes:
            for parameter, flat in zip(self.parameters.values(), self.gradients.split(sizes), strict=True):
                parameter.grad = flat.view_as(parameter)

    @property
    def numbers(self) -> str:
        """The coarsest number type that it computes with."""
        coarse = any(isinstance(module, Quantised) for module in self.model.modules())
        return "nf4" if coarse else str(self.scorer.computes_in).removeprefix("torch.")

    def zero_sums(self) -> None:
        """Begin an optimizer step: clear gradients and statistics."""
        self.summed.zero_()
        if self.layout.sharded:
            self.optimizer.zero_grad()

    def add_up(self) -> tuple[list[float], float]:
        """End the microbatches of a step: its statistics (trainer.statistics.SUMS), and its gradient's norm.

        Both are the same on all ranks, which call this together.
        """
        layout = self.layout
        if not layout.sharded:
            if layout.world_size > 1:
                if layout.context_parallel > 1:  # each rank of a group has all of its statistics
                    self.sums.div_(layout.context_parallel)
                with waiting_for_peers("adding up the gradients"):
                    dist.all_reduce(self.summed)
            return self.sums.tolist(), torch.linalg.vector_norm(self.gradients).item()
        with waiting_for_peers("adding up the gradients and their norm"):
            parallel.add_up_partial(self._partial, layout)
            if layout.nodes > 1:
                parallel.add_up_over_nodes(self._gradients(), layout, self.device)
            squares = [parallel.squared_norm_share(g, layout.world_size) for g in self._gradients()]
            square = torch.stack(squares).sum().to(self.device)
            sums = torch.cat([self.sums / layout.group_size, square[None]])
            dist.all_reduce(sums)
        *statistics, square = sums.tolist()
        return statistics, square**0.5

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def scale_gradients(self, factor: float) -> None:
        """Multiply the step's gradients, in place."""
        if factor == 1:
            return
        if self.layout.sharded:
            for gradient in self._gradients():
                parallel.local_part(gradient).mul_(factor)
        else:
            self.gradients.mul_(factor)

    def apply(self, settings: TrainerSettings, done: float = 0.0) -> float:
        """Take one step from the gradients; returns its learning rate. `done`: see learning_rate."""
        if (settings.optimizer == "muon") != isinstance(self.optimizer, MuonAndAdamW):
            raise ValueError(
                f"these steps were taken with trainer.optimizer={settings.optimizer}, the run has another; "
                "set it back until a later trainer state is saved (trainer.save_interval)"
            )
        lr = learning_rate(self.optimizer_step, settings, done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["betas"] = settings.betas
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        self.optimizer.step()
        self.optimizer_step += 1
        return lr

    @torch.no_grad()
    def take_over_lead(self) -> None:
        """Make copies equal to the first node's: machines of different kinds round differently. Collective.

        The copies in a tensor group need none of this: they are on one node.
        """
        if (copies := self.layout.copies) is None:
            return
        values = list(self.parameters.values())
        checksum = torch.stack([fingerprint(parallel.local_part(value)) for value in values]).sum()
        # Of all ranks by gloo, which says what became of a peer.
        bounds = torch.stack([checksum, -checksum]).to(self.device if self.layout.sharded else "cpu")
        with waiting_for_peers("comparing the weights with the first node's"):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=copies)
            are_alike = bool(bounds[0] == -bounds[1])
        if are_alike:
            return
        with waiting_for_peers("taking over the weights of the first node"):
            for value in values:
                parallel.take_over_first(value, self.layout, self.device)

    def to_host(self) -> None:
        """Free the GPU for the engine: move weights and optimizer state to host memory, drop the gradients.

        Until to_device nothing can be computed. On a CPU this does nothing.
        """
        if self.device.type == "cpu" or self._on_host:
            return
        self._on_host = True
        for parameter in self.parameters.values():
            parameter.grad = None
        self.summed = self.gradients = self.sums = torch.zeros(0)
        scorers, states = self._away()
        tensors = [tensor for scorer in scorers for tensor in (*scorer.parameters(), *scorer.buffers())]
        self._host.begin([*tensors, *(value for state in states for value in state.values())])
        self._move(self._host.copy)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def to_device(self) -> None:
        """Undo to_host."""
        if self._on_host:
            self._on_host = False
            self._move(lambda tensor: tensor.to(self.device, non_blocking=True))
            self._make_room()

    def _away(self) -> tuple[list[Scorer], list[dict[str, Tensor]]]:
        """Return the models and moments that move. FSDP's own offload keeps its own on the host anyway."""
        scorers = [scorer for scorer in (self.scorer, self.reference) if scorer and not scorer.offloaded]
        return scorers, [] if self.scorer.offloaded else [*self.optimizer.state.values()]

    def _move(self, to: Callable[[Tensor], Tensor]) -> None:
        scorers, states = self._away()
        for scorer in scorers:
            scorer._apply(to)
        for state in states:
            state.update({name: to(value) for name, value in state.items()})


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of a float32 tensor: equal for equal tensors, and almost never for others."""
    bits = tensor.detach().flatten().view(torch.int32)
    sums = [
        (part.long() * torch.arange(1, len(part) + 1, device=part.device)).sum()
        for part in bits.split(1 << 24)
    ]
    # The sum of all stays below 2^62, so that its negative fits too.
    return torch.stack(sums).sum() % (1 << 40)


def learning_rate(optimizer_step: int, settings: TrainerSettings, done: float = 0.0) -> float:
    """Return the learning rate after `optimizer_step` steps of the whole run: a linear warm-up by steps,
    times the schedule. `done` is the fraction of the run's iterations that is over.

    The schedule follows the iterations: how many steps a run will have is not known before, since flat groups
    are left out, while the iteration and `iterations` are the same after any restart.
    """
    warm = min(1.0, (optimizer_step + 1) / max(1, settings.warmup_steps))
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return settings.learning_rate * warm * factor[settings.schedule]


def build_learner(
    base_dir: Path,
    device: torch.device,
    settings: TrainerSettings,
    model_dir: Path | None = None,
    progress: Progress = SILENT,
) -> Learner:
    """Load the policy of a Hugging Face directory, or of an adapter's directory, in its layout.

    `model_dir`: where this machine has the adapter's model; default: as the adapter says. All ranks call this
    together. Master weights are float32; weights that adapters leave unchanged are in the dtype of the
    computation. There is no optimizer state yet. Raises LayoutError.
    """
    parameters = count_parameters(model_directory(base_dir, model_dir))
    layout = Layout.choose(parameters, settings, device)
    scorer = build_scorer(base_dir, device, settings, layout, torch.float32, model_dir, progress)
    learner = Learner(scorer, layout, settings.optimizer)
    learner.arrange(settings.share_prompts)
    if settings.routing_replay:
        scorer.routes = routes_of(scorer.model)
        if not scorer.routes.layers:
            raise LayoutError("trainer.routing_replay: the model has no layer with experts; leave it out")
    return learner


def _decay_groups(parameters: dict[str, Tensor], matrices: set[int]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: matrices decay; norms and biases (one-dimensional) do not. `matrices`:
    ids of those that Muon trains.

    The fused kernel needs the parameters of a group on one mesh.
    """
    groups: dict[tuple[bool, bool, Any], list[Tensor]] = {}
    for parameter in parameters.values():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim > 1, id(parameter) in matrices, mesh), []).append(parameter)
    return [
        {"params": params, "decays": decays, "is_muon": is_muon}
        for (decays, is_muon, _), params in groups.items()
    ]
