"""Record which experts each token goes to, and send tokens to recorded ones (R3, arXiv 2510.11370).

The routers of all families choose by a topk of (tokens, experts). It is watched while a layer's experts are
computed, also if they are computed again in a backward pass, and the code of no family is changed.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)


class Routes:
    """The routes of a model's tokens: `taken` by the last call, or `replayed` in the calls to come."""

    def __init__(self, model: nn.Module) -> None:
        self.replayed: Tensor | None = None
        """(tokens, layers with experts x experts of a token); below 0: the token's own."""
        self._taken: list[Tensor] = []
        self._open: list[_RouterHook] = []
        for block in model.modules():
            children = dict(block.named_children())
            router = children.get("router", children.get("gate"))
            if router is not None and "experts" in children:
                experts = next(len(weight) for weight in router.parameters() if weight.ndim == 2)
                block.register_forward_pre_hook(partial(self._enter, len(self._taken), experts))
                block.register_forward_hook(self._leave, always_call=True)
                self._taken.append(torch.zeros(0))

    @property
    def layers(self) -> int:
        """How many layers have experts."""
        return len(self._taken)

    @property
    def chosen_experts(self) -> NDArray[np.int16]:
        """(tokens, layers, experts of a token) those of the last call."""
        return torch.stack(self._taken, 1).to(torch.int16).cpu().numpy()

    def choose(self, layer: int, scores: Tensor, usual: Any) -> Any:
        """Return the values and indices for topk of a layer's `scores` (tokens, experts), whose own choice is
        `usual`.
        """
        if self.replayed is None:
            self._taken[layer] = usual.indices
            return usual
        width = usual.indices.shape[1]
        recorded = self.replayed[:, layer * width : (layer + 1) * width].to(usual.indices)
        chosen = torch.where(recorded < 0, usual.indices, recorded)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    def _enter(self, layer: int, experts: int, *_: Any) -> None:
        self._open.append(_RouterHook(self, layer, experts))
        self._open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


class _RouterHook(TorchFunctionMode):
    """Inside the context the topk of a layer's router is what `Routes.choose` returns."""

    def __init__(self, routes: Routes, layer: int, experts: int) -> None:
        super().__init__()
        self._routes, self._layer, self._experts = routes, layer, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK and args[0].ndim == 2 and args[0].shape[1] == self._experts:
            return self._routes.choose(self._layer, args[0], result)
        return result


_OF_MODELS: WeakKeyDictionary[nn.Module, Routes] = WeakKeyDictionary()


def routes_of(model: nn.Module) -> Routes:
    """Return the routes of a model, which is watched once only."""
    if model not in _OF_MODELS:
        _OF_MODELS[model] = Routes(model)
    return _OF_MODELS[model]
