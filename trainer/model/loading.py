"""Load a Hugging Face directory as a model in its layout."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engines.embedded.weights import load_model
from rollout.engines.model_dir import ADAPTER_CONFIG
from rollout.engines.model_facts import keep_causal, keep_frequencies
from rollout.storage import files
from trainer.model import parallel, quantised, slices, vision
from trainer.model.parallel import Layout
from trainer.model.rounding import Rounding
from trainer.model.token_logprobs import Scorer
from trainer.progress import SILENT, Progress
from trainer.settings import TrainerSettings


def count_parameters(model_dir: Path) -> int:
    """Return how many parameters the model has; reads the headers of its files."""
    return sum(
        parameter.numel() for parameter in slices.blank_model(model_dir, torch.float32)[0].parameters()
    )


def build_scorer(
    base_dir: Path,
    device: torch.device,
    settings: TrainerSettings,
    layout: Layout,
    dtype: torch.dtype,
    model_dir: Path | None = None,
    progress: Progress = SILENT,
) -> Scorer:
    """Load the model of a Hugging Face directory, or of an adapter's directory, in its layout.

    Trained parameters are in `dtype`; weights that adapters leave unchanged are in the computation's dtype.
    All ranks call this together. Sharded, each reads its own parts of the files and holds no more.
    """
    on_gpu = device.type == "cuda"
    computes_in: torch.dtype = getattr(torch, settings.computes_in(on_gpu))
    rounding = _rounding(settings, layout, on_gpu)
    directory = model_directory(base_dir, model_dir)
    if not layout.sharded:
        model = load_model(directory, dtype)
        if settings.freeze_vision:
            vision.freeze(model)
        model = _with_adapters(model, base_dir, settings)
        _hold_frozen(model, computes_in)  # before it takes twice the bytes of the GPU
        if settings.lora.base_dtype == "nf4":
            quantised.quantise(model, device)
        _compile(model, settings)
        scorer = Scorer(model.to(device), device, rounding, computes_in)
        if on_gpu and settings.activation_checkpointing:
            parallel.checkpoint_layers(parallel.decoder_layers(model))
        _round_vision(model, settings, rounding)
        return scorer
    blank, sources = slices.blank_model(directory, dtype)
    places = slices.held_tensors(blank)
    if settings.freeze_vision:
        vision.freeze(blank)
    model, adapters = _with_blank_adapters(blank, base_dir, settings)
    _hold_frozen(model, computes_in)
    _compile(model, settings)
    scorer = Scorer(model, device, rounding, computes_in, offloaded=settings.cpu_offload and on_gpu)
    parallel.shard(scorer, model, layout, settings, on_gpu)
    model.to_empty(device=torch.device("cpu") if scorer.offloaded else device)
    slices.fill(blank, places, sources, directory, device, progress.count_bytes)
    keep_frequencies(blank)
    keep_causal(blank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapters:
                slices.copy_part(parameter, adapters[name])
    _round_vision(model, settings, rounding)
    return scorer


def _compile(model: Any, settings: TrainerSettings) -> None:
    """Have the layers computed by compiled code, which is made at their first use: the same for all layers
    that are alike, and for rows of any size.
    """
    if settings.compile:
        for layer in parallel.decoder_layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)


def _with_adapters(model: Any, base_dir: Path, settings: TrainerSettings) -> Any:
    """Return the model with the adapters that are to be trained, if any."""
    if not settings.lora.rank:
        return model
    from trainer.model import lora  # peft takes a while to import

    wrapped = lora.wrap(model, settings.lora, settings.freeze_vision)
    if ADAPTER_CONFIG in files.listing(base_dir):
        lora.load_adapter(wrapped, base_dir)
    return wrapped


def _with_blank_adapters(
    blank: Any, base_dir: Path, settings: TrainerSettings
) -> tuple[Any, dict[str, Tensor]]:
    """Return a model on meta with adapters on meta, and the adapters' values.

    peft makes adapters on the device of the weights. For it these are on the CPU, where all values of a
    weight are one number in memory.
    """
    if not settings.lora.rank:
        return blank, {}
    hollow: dict[int, nn.Parameter] = {}
    weights: dict[int, nn.Parameter] = {}
    for _, module, name, weight in _parameters(blank):
        if id(weight) not in hollow:
            zero = torch.zeros((), dtype=weight.dtype)
            hollow[id(weight)] = nn.Parameter(zero.expand(weight.shape), requires_grad=False)
            weight.requires_grad_(False)
            weights[id(hollow[id(weight)])] = weight
        module._parameters[name] = hollow[id(weight)]
    wrapped = _with_adapters(blank, base_dir, settings)
    values: dict[str, Tensor] = {}
    for path, module, name, parameter in _parameters(wrapped):
        if id(parameter) in weights:
            module._parameters[name] = weights[id(parameter)]
        else:
            values[path] = parameter.detach()
            module._parameters[name] = nn.Parameter(values[path].to("meta"))
    return wrapped, values


def _parameters(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """(path, module, name, parameter) of each parameter, tied ones in each of their places."""
    return [
        (f"{path}.{name}" if path else name, module, name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _rounding(settings: TrainerSettings, layout: Layout, on_gpu: bool) -> Rounding | None:
    """Return how trained weights must be rounded to be those that are served; None: not, or FSDP does it."""
    if settings.computes_in(on_gpu) == "bfloat16":
        return None if layout.sharded else Rounding(torch.bfloat16, torch.bfloat16)
    rounds = settings.rounded_to(on_gpu) == "bfloat16"
    return Rounding(torch.bfloat16, torch.float32) if rounds else None


def _hold_frozen(model: Any, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _round_vision(model: Any, settings: TrainerSettings, rounding: Rounding | None) -> None:
    """Round what is frozen and saved nevertheless: only trained weights are rounded where they are used."""
    if rounding is not None and settings.freeze_vision and not settings.lora.rank:
        for parameter in vision.vision_parameters(model).values():
            parameter.copy_(parameter.to(rounding.to))


def model_directory(base_dir: Path, model_dir: Path | None) -> Path:
    """Return the directory of the model that `base_dir` holds, or holds an adapter for."""
    if ADAPTER_CONFIG not in files.listing(base_dir):
        return base_dir
    return model_dir or Path(json.loads(files.read(base_dir / ADAPTER_CONFIG))["base_model_name_or_path"])
