"""The memory that the trainer needs on a GPU: the arithmetic behind the table of docs/gpus.md. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.settings import TrainerSettings

TRAINED_BYTES = 16
"""Of a trained parameter: weight, gradient and two moments of AdamW in float32."""
HALF_BYTES = 2
"""Of a parameter in bfloat16."""
LOGITS_BYTES = 1e9
"""A chunk of logits."""
ENDS_BYTES = 6
"""Of a parameter of embeddings and head, while their gradients are added up."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Shape:
    """A model in numbers of parameters."""

    depth: int
    """Layers."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    """Of all layers."""
    ends: int
    """Of embeddings and head."""
    rest: int
    """Of what is neither, such as the last norm."""
    split: int
    """Of all layers, those that tensor parallelism divides."""
    hidden: int
    adapters: int = 0
    """Of adapters, if they are trained in place of the model."""

    @property
    def all(self) -> int:
        return self.layers + self.ends + self.rest

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, tuple[int, ...]], adapters: int = 0) -> "Shape":
        """Return the shape of a model from the shapes of its tensors, by name."""
        layers: dict[int, int] = {}
        split, ends, rest = 0, list[tuple[int, ...]](), 0
        for name, shape in tensors.items():
            if match := _LAYER.search(f".{name}"):
                layers[int(match[1])] = layers.get(int(match[1]), 0) + math.prod(shape)
                split += math.prod(shape) if len(shape) > 1 else 0
            elif len(shape) > 1:
                ends.append(shape)
            else:
                rest += math.prod(shape)
        return cls(
            depth=len(layers),
            layer=max(layers.values(), default=0),
            layers=sum(layers.values()),
            ends=sum(map(math.prod, ends)),
            rest=rest,
            split=split,
            hidden=min((min(shape) for shape in ends), default=0),
            adapters=adapters,
        )


def is_sharded(shape: Shape, trainer: TrainerSettings, gpus: int) -> bool:
    """Return whether the model is sharded when so many GPUs train it."""
    if trainer.layout == "auto":
        large = gpus > 1 and shape.all >= trainer.shard_from_parameters
        return large or trainer.tensor_parallel_size > 1
    return trainer.layout == "sharded"


def held_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return what each of `gpus` GPUs holds all the time: weights, gradients, AdamW."""
    if not is_sharded(shape, trainer, gpus):
        return _state_bytes(shape, shape.all)
    if trainer.cpu_offload:
        return 0.0
    size = trainer.tensor_parallel_size
    return _state_bytes(shape, shape.all - shape.split * (1 - 1 / size)) / (gpus / size)


def _state_bytes(shape: Shape, parameters: float) -> float:
    if shape.adapters:
        return TRAINED_BYTES * shape.adapters + HALF_BYTES * parameters
    return TRAINED_BYTES * parameters


def gathered_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return what a GPU holds in bfloat16 to compute: two layers, embeddings and head, unless it holds frozen
    ones in bfloat16 anyway.
    """
    if shape.adapters and not is_sharded(shape, trainer, gpus):
        return HALF_BYTES * shape.adapters
    return HALF_BYTES * (2 * shape.layer / trainer.tensor_parallel_size + shape.ends)


def inputs_bytes(shape: Shape, trainer: TrainerSettings) -> float:
    """Return the size of the inputs of all layers for a microbatch."""
    return HALF_BYTES * shape.hidden * trainer.max_tokens_per_microbatch * shape.depth


def base_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return what a GPU holds of the model that the run started from, if the loss compares with it."""
    if not trainer.needs_reference or shape.adapters:  # adapters can be switched off
        return 0.0
    return HALF_BYTES * shape.all / (gpus if is_sharded(shape, trainer, gpus) else 1)


def least_bytes(shape: Shape, trainer: TrainerSettings, gpus: int) -> float:
    """Return what a GPU needs at least; what one layer keeps while it is computed comes on top."""
    ends = 0 if shape.adapters else ENDS_BYTES * shape.ends
    held = held_bytes(shape, trainer, gpus) + gathered_bytes(shape, trainer, gpus)
    held += base_bytes(shape, trainer, gpus)
    logits = LOGITS_BYTES * (2 if trainer.entropy_bonus else 1)  # and their gradient by way of the entropy
    return held + inputs_bytes(shape, trainer) + logits + ends
