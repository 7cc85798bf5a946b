"""The memory that the trainer needs on a GPU: the arithmetic behind the table of docs/gpus.md. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.settings import TrainerSettings

TRAINED_BYTES = 16
"""Bytes of a trained parameter: weight, gradient and two moments of AdamW in float32."""
NF4_BYTES = 0.5 + 4 / 64
"""Bytes of a parameter in NF4: 4 bits, and a scale in float32 for each 64."""
HALF_BYTES = 2
"""Bytes of a parameter in bfloat16."""
FLOAT_BYTES = 4
"""Bytes of a number in float32."""
LOGITS_BYTES = 1e9
"""Bytes of a chunk of logits."""
ENDS_BYTES = HALF_BYTES + FLOAT_BYTES
"""Bytes of a parameter of embeddings and head, while their gradients are added up."""
WIDE, NARROW = 8, 16
"""Numbers in bfloat16 that a layer keeps of each token in its backward pass: so many times its widest matrix
(what the gated MLP makes in between, and gradients of that), and the hidden size (norms, attention)."""
_VISION = re.compile(r"(?:^|\.)(?:vision|visual|image|multi_modal|connector|mlp1)")
"""How the names of tensors of vision towers and projectors begin, or go on after a dot."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Shape:
    """A model in numbers of parameters."""

    depth: int
    """How many layers it has."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    """Parameters of all layers."""
    ends: int
    """Parameters of embeddings and head."""
    other_values: int
    """Parameters that are in neither, such as the last norm."""
    split: int
    """Parameters of all layers that tensor parallelism divides."""
    head: int
    """Parameters of the larger one of embeddings and head, which may be one."""
    hidden: int
    wide: int
    """The longest side of a matrix of a layer."""
    adapters: int = 0
    """Parameters of adapters, if they are trained in place of the model."""
    matrices: int = 0
    """Parameters of the layers' matrices, without those of experts, which are one tensor in training."""
    frozen: int = 0
    """Parameters of the vision tower and projector, if they are not trained (trainer.freeze_vision)."""

    @property
    def all(self) -> int:
        return self.layers + self.ends + self.other_values + self.frozen

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, tuple[int, ...]], adapters: int = 0, freeze_vision: bool = True
    ) -> "Shape":
        """Return the shape of a model from the shapes of its tensors, by name."""
        every = sum(map(math.prod, tensors.values()))
        tensors = without_vision(tensors) if freeze_vision else tensors
        layers: dict[int, int] = {}
        split, matrices, ends, other_values, wide = 0, 0, list[tuple[int, ...]](), 0, 0
        for name, shape in tensors.items():
            if match := _LAYER.search(f".{name}"):
                layers[int(match[1])] = layers.get(int(match[1]), 0) + math.prod(shape)
                split += math.prod(shape) if len(shape) > 1 else 0
                matrices += math.prod(shape) if len(shape) == 2 and ".experts." not in name else 0
                wide = max(wide, *shape) if len(shape) == 2 else wide
            elif len(shape) > 1:
                ends.append(shape)
            else:
                other_values += math.prod(shape)
        return cls(
            depth=len(layers),
            layer=max(layers.values(), default=0),
            layers=sum(layers.values()),
            ends=sum(map(math.prod, ends)),
            other_values=other_values,
            split=split,
            head=max(map(math.prod, ends), default=0),
            hidden=min((min(shape) for shape in ends), default=0),
            wide=wide,
            adapters=adapters,
            matrices=matrices,
            frozen=every - sum(map(math.prod, tensors.values())),
        )


def without_vision(tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Return the tensors without those of the vision tower and projector, by their names."""
    return {name: shape for name, shape in tensors.items() if not _VISION.search(name)}


def is_sharded(shape: Shape, trainer: TrainerSettings, gpus: int) -> bool:
    """Return whether the model is sharded when so many GPUs train it. Here and below, with the layout
    `hybrid`, those of a node.
    """
    if trainer.shards_by_size:
        large = gpus > 1 and shape.all >= trainer.shard_from_parameters
        return large or trainer.tensor_parallel_size > 1
    return trainer.layout in ("sharded", "hybrid")


def held_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes that each of `gpus` GPUs holds all the time: weights, gradients, optimizer's state."""
    if not is_sharded(shape, trainer, gpus):
        return _state_bytes(shape, trainer, 1)
    if trainer.cpu_offload:
        return 0.0
    size = trainer.tensor_parallel_size
    return _state_bytes(shape, trainer, size) / (gpus / size)


def _state_bytes(shape: Shape, trainer: TrainerSettings, size: int) -> float:
    """Return the bytes that each of a tensor group of `size` ranks holds of a whole model. Muon has one
    moment.
    """
    parameters = shape.all - shape.split * (1 - 1 / size)
    saved = FLOAT_BYTES if trainer.optimizer == "muon" else 0
    if shape.adapters:
        small = shape.matrices if trainer.lora.base_dtype == "nf4" else 0
        frozen = HALF_BYTES * (parameters - small) + NF4_BYTES * small
        return (TRAINED_BYTES - saved) * shape.adapters + frozen
    trained = parameters - shape.frozen
    return TRAINED_BYTES * trained - saved * shape.matrices / size + HALF_BYTES * shape.frozen


def gathered_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes that a GPU holds in bfloat16 to compute: two layers, embeddings and head if it is
    sharded, else a layer, unless it holds frozen ones in bfloat16 anyway; of those in 4 bits one matrix.
    """
    if not is_sharded(shape, trainer, gpus):
        matrix = shape.wide * shape.hidden if trainer.lora.base_dtype == "nf4" else 0
        return HALF_BYTES * (shape.adapters + matrix or shape.layer)
    return HALF_BYTES * (2 * shape.layer / trainer.tensor_parallel_size + shape.ends)


def inputs_bytes(shape: Shape, trainer: TrainerSettings) -> float:
    """Return the size of the inputs of all layers for a microbatch. If none is computed again, it is that of
    all that they keep: half of what is wide are gradients.
    """
    numbers = float(shape.hidden)
    if not trainer.activation_checkpointing:
        numbers = WIDE / 2 * shape.wide / trainer.tensor_parallel_size + NARROW * shape.hidden
    return HALF_BYTES * numbers * _tokens(trainer) * shape.depth


def _tokens(trainer: TrainerSettings) -> float:
    """Return how many tokens of a microbatch a rank computes."""
    return trainer.max_tokens_per_microbatch / trainer.context_parallel


def base_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes a GPU holds of the model that the run started from, if the loss compares with it."""
    if not trainer.needs_reference or shape.adapters:  # adapters can be switched off
        return 0.0
    return HALF_BYTES * shape.all / (gpus if is_sharded(shape, trainer, gpus) else 1)


def least_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes that a GPU needs: all that it holds, and the most that comes on top while it computes
    a step of several microbatches. What the allocator, NCCL and kernels take is not in it.
    """
    resident = held_bytes(shape, trainer, gpus) + base_bytes(shape, trainer, gpus)
    inputs = inputs_bytes(shape, trainer)
    computing = max(_head_bytes(shape, trainer, gpus), _layer_bytes(shape, trainer, gpus))
    return resident + max(inputs + computing, _end_bytes(shape, trainer, gpus))


def _head_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes of a chunk of logits with its gradient of the head in bfloat16, and their sum in
    float32.
    """
    logits = LOGITS_BYTES * (2 if trainer.rewards_entropy else 1)  # and their gradient by way of the entropy
    ends = HALF_BYTES * shape.ends if is_sharded(shape, trainer, gpus) else 0
    return ends + logits + (0 if shape.adapters else ENDS_BYTES * shape.head)


def _layer_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes that a layer takes in its backward pass, in which it is computed again.

    Sharded, the next layer is gathered already, the gradient of the one before is on its way in float32, and
    that of the head waits in bfloat16.
    """
    size = trainer.tensor_parallel_size
    numbers = WIDE * shape.wide / size + NARROW * shape.hidden
    activations = HALF_BYTES * _tokens(trainer) * numbers
    if is_sharded(shape, trainer, gpus):
        gradients = HALF_BYTES * shape.head + ENDS_BYTES * shape.layer / size
    else:
        gradients = ENDS_BYTES * shape.layer
    return gathered_bytes(shape, trainer, gpus) + activations + (0 if shape.adapters else gradients)


def _end_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return the bytes of the gradients of embeddings and head at the end of a microbatch.

    Sharded, they are whole in float32, beside themselves in bfloat16 and then this rank's part. Replicated,
    that of one follows that of the other, and the sum of both, if they are tied.
    """
    if shape.adapters:
        return 0.0
    if not is_sharded(shape, trainer, gpus):
        return (3 * FLOAT_BYTES if shape.ends == shape.head else ENDS_BYTES) * shape.head
    part = FLOAT_BYTES * trainer.tensor_parallel_size / gpus
    return (FLOAT_BYTES + max(HALF_BYTES, part)) * shape.ends
