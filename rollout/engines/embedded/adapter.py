"""Merge an adapter (LoRA) into the embedded engine's model: W + scale B A for each layer that it names.

The own weights of these layers are kept for the next adapter. They take the memory of these layers again, and
once more while an adapter is being loaded.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout.engines.content import check_adapter, content_sum
from rollout.engines.model_dir import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PathLike,
    WeightsError,
    adapter_scale,
    check_model_dir,
    is_adapter,
)

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
_ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # These do not change the model's own weights; `pissa` and others do.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Values of adapter_config.json for which W + scale B A is right."""
_UNIMPORTANT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("r", "lora_alpha", "use_rslora", "megatron_core", "qalora_group_size"),
}
"""Fields that do not change the sum, or are read. All others must have an empty value."""


class MergedAdapter:
    """The adapter in a model's weights; none at first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: dict[str, nn.Parameter] = {}
        """Weights of layers without an adapter, by the layer's name."""

    @property
    def is_there(self) -> bool:
        """Whether an adapter is merged into the model's weights."""
        return bool(self._own)

    def load(self, directory: PathLike) -> None:
        """Replace the earlier adapter by this one. WeightsError changes nothing."""
        merged = dict(self._merged(directory))
        for layer, weight in {**self._own, **merged}.items():
            module: Any = self._model.get_submodule(layer)
            self._own.setdefault(layer, module.weight)
            module.weight = weight

    def own_sums(self) -> dict[str, list[int]]:
        """Weight -> the sum of what it is without an adapter, for the layers that have had one."""
        return {f"{layer}.weight": [content_sum(weight)] for layer, weight in self._own.items()}

    def check(self, directory: PathLike) -> None:
        """Raise WrongContent unless the layers hold what this adapter makes of their own weights."""
        expected: dict[str, int] = {}
        served: dict[str, list[int]] = {}
        for layer, weight in itertools.chain(self._own.items(), self._merged(directory)):
            module: Any = self._model.get_submodule(layer)
            expected[f"{layer}.weight"] = content_sum(
                weight
            )  # a merged weight takes the place of its own one
            served[f"{layer}.weight"] = [content_sum(module.weight)]
        check_adapter(expected, [served])

    def _merged(self, directory: PathLike) -> Iterator[tuple[str, nn.Parameter]]:
        """Each layer that an adapter names, and its weight with that adapter."""
        check_model_dir(directory)
        if not is_adapter(directory):
            raise WeightsError(f"{directory}: has no {ADAPTER_CONFIG}, so it is not an adapter")
        scale = _scale(Path(directory))
        try:
            tensors = load_file(Path(directory) / ADAPTER_WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{directory}: {ADAPTER_WEIGHTS} cannot be read: {error}") from error
        for name in sorted({name.removesuffix(_A).removesuffix(_B) for name in tensors}):
            if not {name + _A, name + _B} <= tensors.keys():
                raise WeightsError(f"{directory}: {name!r} is not a pair of lora_A and lora_B")
            layer = name.removeprefix(_PREFIX)
            base: Tensor = self._own[layer] if layer in self._own else self._weight(layer, directory)
            yield layer, _sum(base, scale, tensors[name + _B], tensors[name + _A], name, directory)

    def _weight(self, layer: str, directory: PathLike) -> Tensor:
        try:
            module: Any = self._model.get_submodule(layer)
        except AttributeError:
            raise WeightsError(f"{directory}: the model has no layer {layer!r}") from None
        if not isinstance(module, nn.Linear):
            raise WeightsError(
                f"{directory}: layer {layer!r} is a {type(module).__name__}; the embedded engine takes "
                "adapters of linear layers only, use vLLM"
            )
        return module.weight


def _sum(base: Tensor, scale: float, b: Tensor, a: Tensor, name: str, directory: PathLike) -> nn.Parameter:
    """Compute `base` + scale B A, (out, in), at least in float32."""
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != base.shape or a.shape[0] != b.shape[1]:
        raise WeightsError(
            f"{directory}: {name!r} is {tuple(b.shape)} x {tuple(a.shape)}, "
            f"the model's weight there is {tuple(base.shape)}"
        )
    dtype = torch.promote_types(base.dtype, torch.float32)
    total = torch.addmm(base.to(dtype), b.to(dtype), a.to(dtype), alpha=scale)
    return nn.Parameter(total.to(base.dtype), requires_grad=False)


def _scale(directory: Path) -> float:
    """Return the factor of B A. Raises WeightsError if the adapter does more than add B A."""
    file = directory / ADAPTER_CONFIG
    config: dict[str, Any] = json.loads(file.read_bytes())
    for key, value in config.items():
        fits = value in _ALLOWED[key] if key in _ALLOWED else key in _UNIMPORTANT or not value
        if not fits:
            raise WeightsError(f"{file}: {key}={value!r} is not supported by the embedded engine, use vLLM")
    return adapter_scale(directory)
