"""Read the weights of the embedded engine's model, and replace them by those of another directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rollout.engines.model_dir import PathLike, WeightsError, check_model_dir, is_adapter, weight_files
from rollout.engines.model_facts import keep_causal, keep_frequencies

_UNIMPORTANT = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Fields of config.json that may differ between versions of a model."""


class ModelWeights:
    """A model, and the configuration that it was read with."""

    def __init__(
        self,
        model_dir: PathLike,
        dtype: torch.dtype,
        like: PreTrainedModel | None = None,
    ) -> None:
        """Read the model as transformers does. Raises WeightsError as load_model does, and if tensors have
        other shapes than in `like`.
        """
        self.model = load_model(model_dir, dtype)
        self._dtype = dtype
        self._config = _config(model_dir)
        if like is None:
            return
        old, new = (
            {name: tuple(tensor.shape) for name, tensor in m.state_dict().items()} for m in (like, self.model)
        )
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise WeightsError(
                    f"{model_dir}: tensor {name!r} has shape {new.get(name)}, in the model served it has "
                    f"{old.get(name)}: another architecture is not a new version of it"
                )

    def take(self, model_dir: PathLike) -> bool:
        """Put the tensors of another version into the model. Its files must name them as the model does.

        Else returns False and changes nothing (transformers renames some tensors when it reads them, or the
        configuration differs): then read it as a new model. Raises WeightsError if a file is damaged.
        """
        check_model_dir(model_dir)
        if is_adapter(model_dir) or _config(model_dir) != self._config:
            return False
        tensors: dict[str, Tensor] = {}
        try:
            for name in weight_files(model_dir):
                tensors |= load_file(Path(model_dir) / name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{model_dir}: cannot be read: {error}") from error
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        ids = {id(parameters[name]) for name in tensors.keys() & parameters.keys()}
        fits = (
            tensors.keys() <= parameters.keys()
            and len(ids) == len(tensors)  # a tied tensor has one name
            and all(tensors[name].shape == parameters[name].shape for name in tensors)
            and ids == {id(parameter) for parameter in parameters.values()}
            and not _saved_buffers(self.model)
        )
        if not fits:
            return False
        for name, tensor in tensors.items():
            parameters[name].data.copy_(tensor)  # fresh pages would cost more than the copy
        return True


def auto_model(model_type: str) -> Any:
    """Return the class with which transformers loads models of a type."""
    takes_pictures = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    is_of_text = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if takes_pictures and not is_of_text else AutoModelForCausalLM


def load_model(model_dir: PathLike, dtype: torch.dtype | Literal["auto"], **more: Any) -> PreTrainedModel:
    """Return the model, ready to generate, or to be trained. `more`: for `from_pretrained`. Raises
    WeightsError if files are damaged, or if tensors are missing or have other shapes.
    """
    check_model_dir(model_dir)
    if is_adapter(model_dir):
        raise WeightsError(f"{model_dir}: is an adapter, not a whole model; give the model that it adds to")
    try:
        loaded: Any = auto_model(_config(model_dir).get("model_type", "")).from_pretrained(
            model_dir,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,  # else it asks whoever sits at the terminal
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            # The attention is transformers' choice: sdpa, or eager where a model has none. Its
            # flash_attention_2 would ignore restarting positions where there are several rows.
            # The default for mixtures of experts, torch's grouped matrix product, knows no float64.
            **({"experts_implementation": "eager"} if dtype == torch.float64 else {}),
            **more,
        )
    except Exception as error:  # a library's loader: ValueError, RuntimeError, OSError, SafetensorError, ...
        raise WeightsError(f"{model_dir}: cannot be loaded: {type(error).__name__}: {error}") from error
    model, info = loaded
    refuse_incomplete(model_dir, model, info)
    keep_frequencies(model)
    keep_causal(model)
    return model.eval()


def refuse_incomplete(model_dir: PathLike, model: Any, info: Mapping[str, Any]) -> None:
    """Raise WeightsError unless the files hold all tensors of the model, in their shapes: transformers fills
    the others at random. `info`: what `from_pretrained` tells of the loading.
    """
    expected, kind = model.state_dict().keys(), type(model).__name__
    for name, in_files, in_model in sorted(info["mismatched_keys"]):
        raise WeightsError(
            f"{model_dir}: tensor {name!r} has shape {tuple(in_files)} in its files, and {tuple(in_model)} "
            f"in a {kind} of its config.json; give the weights and the config.json of one model"
        )
    if lacking := sorted(expected & set(info["missing_keys"])):
        unknown = sorted(info["unexpected_keys"])
        extra = f"; it does not know {len(unknown)} that are there, e.g. {unknown[0]!r}" if unknown else ""
        raise WeightsError(
            f"{model_dir}: has no values for {len(lacking)} tensors of a {kind}, e.g. "
            f"{', '.join(map(repr, lacking[:3]))}{extra}; give a model that is whole"
        )


def _config(model_dir: PathLike) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model_dir) / "config.json").read_bytes())
    return {key: value for key, value in config.items() if key not in _UNIMPORTANT}


def _saved_buffers(model: PreTrainedModel) -> set[str]:
    """Tensors that a file may hold beside the parameters."""
    return model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
