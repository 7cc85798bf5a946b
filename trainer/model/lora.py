"""Train low-rank adapters (arXiv 2106.09685) instead of all weights: the base model does not change.

A checkpoint of such a run holds adapter_model.safetensors and adapter_config.json as peft writes them, beside
the tokenizer. `AutoModelForCausalLM.from_pretrained` and `PeftModel.from_pretrained` load it. It has no
config.json, or transformers would look for the base model's weights beside it.
"""

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollout.engines.model_dir import ADAPTER_WEIGHTS, tensor_names
from trainer.model.vision import vision_modules
from trainer.settings import LoraSettings

ALL_LINEAR = "all-linear"
ROUTERS = r"(.*\.)?(router|gate)(\..*)?"
"""Names, in transformers, of modules that choose experts and of what is in them. A trained router sends
tokens to other experts than the engine's, which rounds otherwise, and engines load no adapter for it."""
_REPR = re.compile(r"Target module (\w+)\(.*\) is not supported\..*", re.DOTALL)
"""How peft says, over as many lines as a module has, that it is of a wrong kind."""
ADAPTER = "default"
"""peft's own name of the adapter."""


class LoraError(ValueError):
    """The settings of the adapters do not fit the model or the checkpoint."""


def wrap(model: Any, settings: LoraSettings, freeze_vision: bool = True) -> Any:
    """Wrap the transformers `model`, before it is sharded, with new adapters, in peft's wrapper.

    With the target all-linear a router of experts gets none, unlike if it is named, nor do fused experts.
    With `freeze_vision` no module of the vision tower or projector gets one, whatever its name.
    Only the adapters are trained, in float32 whatever the model's weights are. They add nothing yet (B is 0),
    and A is the same in every process. With `.disable_adapter()` the result is the base model. Raises
    LoraError if peft or what `base_dtype` needs is not installed, or if the model has no module for a target.
    """
    try:
        from peft import LoraConfig, get_peft_model  # here, because it takes 2 s and most runs do without
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ModuleNotFoundError as error:
        raise LoraError(f"trainer.lora needs peft ({error}): pip install -e '.[lora]'") from error
    if settings.base_dtype == "nf4" and find_spec("bitsandbytes") is None:
        raise LoraError("trainer.lora.base_dtype=nf4 needs bitsandbytes: pip install -e '.[qlora]'")

    targets = [target for target in (part.strip() for part in settings.targets.split(",")) if target]
    everywhere = targets == [ALL_LINEAR]
    vision = vision_modules(model) if freeze_vision else []
    if not everywhere:
        _check_targets(model, targets, settings.targets, vision)
    routers = everywhere and any(
        isinstance(module, torch.nn.Linear) and re.fullmatch(ROUTERS, name)
        for name, module in model.named_modules()
    )
    left_out = [rf"{re.escape(name)}(\..*)?" for name in vision] + ([ROUTERS] if routers else [])
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  peft takes floats too
        target_modules=ALL_LINEAR if everywhere else targets,
        exclude_modules="|".join(left_out) or None,  # peft warns if it excludes nothing
    )
    if everywhere:  # of a family with fused experts peft adapts these and the router, which no engine serves
        convert_peft_config_for_transformers(config, model, None)
        config.target_parameters, config.rank_pattern, config.alpha_pattern = None, {}, {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)  # peft draws on the CPU
        # peft asks transformers by a name that is deprecated there.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        # peft notes the ranks of fused experts, whether they are a target or not.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match any targeted", RuntimeWarning)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:
            reason = _REPR.sub(r"\1 can have no adapter; name modules inside it, or others", str(error))
            raise LoraError(f"trainer.lora.targets={settings.targets}: {reason}") from error
    return wrapped


def _check_targets(model: Any, targets: Sequence[str], shown: str, left_out: Sequence[str]) -> None:
    """Raise LoraError for a target that names no module, or only such as are in those `left_out`."""
    modules = {name: module for name, module in model.named_modules() if name}
    linear = sorted({name.split(".")[-1] for name, m in modules.items() if isinstance(m, torch.nn.Linear)})
    for target in targets or [""]:
        named = [f"{name}." for name in modules if f".{name}".endswith(f".{target}")]
        if named and all(name.startswith(tuple(f"{outer}." for outer in left_out)) for name in named):
            raise LoraError(
                f"trainer.lora.targets={shown}: {target!r} is in the vision tower or projector alone, which "
                "get no adapters; add trainer.freeze_vision=false, or leave it out"
            )
        if not named:
            raise LoraError(
                f"trainer.lora.targets={shown}: the model has no module {target!r}; {ALL_LINEAR} alone means "
                f"all linear layers, and these are called {', '.join(linear)}"
            )


def load_adapter(wrapped: Any, directory: Path) -> None:
    """Put the weights of an adapter directory into the adapters of `wrapped`, before it is sharded.

    Raises LoraError if they were trained with other settings, WeightsError if files are damaged.
    """
    from peft import LoraConfig, set_peft_model_state_dict

    actual = {name: shape for name, (_, shape) in tensor_names(directory).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in _state_dict(wrapped).items()}
    vision = tuple(f"base_model.model.{name}." for name in vision_modules(wrapped.get_base_model()))
    was_frozen, is_frozen = (
        not any(name.startswith(vision) for name in names) for names in (actual, expected)
    )
    if was_frozen != is_frozen:
        raise LoraError(
            f"{directory} was trained with trainer.freeze_vision={str(was_frozen).lower()}, now it is "
            f"{str(is_frozen).lower()}; give the same again, or start a new run"
        )
    config, saved = wrapped.peft_config[ADAPTER], LoraConfig.from_pretrained(str(directory))
    for name, field in (("rank", "r"), ("alpha", "lora_alpha"), ("targets", "target_modules")):
        given_value, saved_value = getattr(config, field), getattr(saved, field)
        if given_value != saved_value:
            raise LoraError(
                f"{directory} was trained with trainer.lora.{name}={_shown(saved_value)}, now it is "
                f"{_shown(given_value)}; give the same again, or start a new run"
            )
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise LoraError(
                f"{directory}: tensor {name!r} has shape {actual.get(name)}, in the model it has "
                f"{expected.get(name)}"
            )
    set_peft_model_state_dict(wrapped, load_file(directory / ADAPTER_WEIGHTS))


def saved_adapter(wrapped: Any, tensors: Mapping[str, Tensor], base: str) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the configuration that peft's own `save_pretrained` would write.

    `tensors`: the trained parameters, whole and on the CPU, by the wrapped model's own names for them.
    `base`: the base model's directory or id, which is written down for those who load the adapter.
    """
    config = copy.copy(wrapped.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    return _state_dict(wrapped, dict(tensors)), config


def _state_dict(wrapped: Any, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the adapters' tensors by the names that peft saves them under."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(wrapped, tensors, save_embedding_layers=False)


def _shown(value: Any) -> str:
    return ",".join(sorted(value)) if isinstance(value, set) else str(value)
