"""Compute with weights rounded as the engine has them, while the optimizer keeps its own in float32.

At usual learning rates a step changes few numbers of a weight in bfloat16. Logprobs of the float32 weights
would be those of a policy that no engine serves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rounding(NamedTuple):
    """How trained weights are rounded where they are used."""

    to: torch.dtype
    computes_in: torch.dtype

    @contextmanager
    def applied_to(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside the context the modules' own trained weights are rounded; gradients reach the exact ones."""
        places = [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        rounded: dict[int, Tensor] = {}  # tied ones once
        try:
            for parameters, name, exact in places:
                if id(exact) not in rounded:
                    rounded[id(exact)] = exact.to(self.to).to(self.computes_in)
                parameters[name] = rounded[id(exact)]  # pyright: ignore[reportArgumentType]
            yield
        finally:
            for parameters, name, exact in places:
                parameters[name] = exact

    def wrap(self, layer: nn.Module) -> None:
        """Have the layer compute with rounded weights, which exist while it does."""
        forward, modules = layer.forward, list(layer.modules())

        @wraps(forward)
        def rounded(*arguments: object, **more: object) -> object:
            with self.applied_to(modules):
                return forward(*arguments, **more)

        layer.forward = rounded
