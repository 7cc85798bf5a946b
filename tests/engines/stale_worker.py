"""vLLM's workers with what a test needs to leave one tensor of theirs as it was before a reload."""

from typing import Any

import torch

from rollout.engines.vllm_worker import WorkerExtension


class StaleWorker(WorkerExtension):
    """Methods that vLLM adds to its worker class."""

    def keep(self, layer: str, tensor: str) -> None:
        """Remember what a layer computes with: a parameter, or a packed copy with `cpu_linear`."""
        owner = self._owner(layer, tensor)
        held = getattr(owner, tensor)
        kept = held if tensor == "cpu_linear" else [piece.clone() for piece in _pieces(held)]
        vars(self)["kept"] = kept, _read(owner, tensor)

    def put_back(self, layer: str, tensor: str, rank: str = "") -> str:
        """Have the layer compute with what was kept, on one rank or all. Whether that has other values."""
        owner = self._owner(layer, tensor)
        kept, before = vars(self)["kept"]
        differs = any(not torch.equal(a, b) for a, b in zip(_read(owner, tensor), before, strict=True))
        if rank in ("", str(self.rank)):
            if tensor == "cpu_linear":
                owner.cpu_linear = kept
            else:
                for piece, old in zip(_pieces(getattr(owner, tensor)), kept, strict=True):
                    piece.data.copy_(old)
        return str(differs)

    def _owner(self, layer: str, tensor: str) -> Any:
        """The part of the layer that has the tensor."""
        parts = self.get_model().get_submodule(layer).modules()
        return next(part for part in parts if hasattr(part, tensor))


def _pieces(held: Any) -> list[torch.Tensor]:
    return [held] if isinstance(held, torch.Tensor) else list(held)


def _read(layer: Any, tensor: str) -> list[torch.Tensor]:
    """The values that a layer computes with. A packed copy shows them when it is multiplied by 1."""
    if tensor != "cpu_linear":
        return [piece.clone() for piece in _pieces(getattr(layer, tensor))]
    width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "input_size", None)
    one = torch.eye(width or layer.embedding_dim, dtype=layer.weight.dtype)
    return [layer.cpu_linear(one, layer.weight, None)]
