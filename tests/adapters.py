"""Adapters to the tiny random models, as the trainer writes them."""

from pathlib import Path


def make_adapter(path: Path, base: Path, *, seed: int, rank: int = 4, targets: str = "all-linear") -> Path:
    """A random adapter to the model of `base` that changes what it generates, with a tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.model.lora import adapter_files, wrap
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
    adapter_files(wrapped, tensors, path, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
    return path
