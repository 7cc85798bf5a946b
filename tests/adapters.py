"""Adapters to the tiny random models, as the trainer writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.engines.model_dir import ADAPTER_WEIGHTS


def make_adapter(path: Path, base: Path, *, seed: int, rank: int = 4, targets: str = "all-linear") -> Path:
    """A random adapter to the model of `base` that changes what it generates, with a tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.model.lora import wrap
    from trainer.settings import LoraSettings

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = wrap(model, LoraSettings(rank=rank, alpha=2.0 * rank, targets=targets))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    path.mkdir()
    save_adapter(wrapped, tensors, path, base)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
    return path


def save_adapter(wrapped: Any, tensors: Mapping[str, Any], path: Path, base: Path) -> None:
    """Write the adapters of `wrapped`, with these values, into the directory `path`."""
    from safetensors.torch import save_file

    from trainer.model.lora import saved_adapter

    saved, config = saved_adapter(wrapped, tensors, str(base))
    save_file(saved, path / ADAPTER_WEIGHTS, {"format": "pt"})
    config.save_pretrained(path)
