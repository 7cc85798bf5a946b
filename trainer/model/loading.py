"""Load a Hugging Face directory as a model in its layout."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout.engines.model_dir import ADAPTER_CONFIG
from rollout.storage import files
from trainer.model import parallel
from trainer.model.parallel import Layout
from trainer.model.token_logprobs import Scorer
from trainer.settings import TrainerSettings


def load_model(model_dir: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Load the causal LM of a Hugging Face directory, as `dtype`; without values if `device` is meta."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        local_files_only=True,
        # The attention is transformers' choice: sdpa, or eager where a model has none. Its
        # flash_attention_2 would ignore restarting positions where there are several rows.
        device_map="meta" if device.type == "meta" else None,
    )
    return model.to(device)


def build_scorer(
    base_dir: Path,
    device: torch.device,
    settings: TrainerSettings,
    layout: Layout,
    dtype: torch.dtype,
    model_dir: Path | None = None,
) -> Scorer:
    """Load the model of a Hugging Face directory, or of an adapter's directory, in its layout.

    Trained parameters are in `dtype`; weights that adapters leave unchanged are in the computation's dtype.
    All ranks call this together.
    """
    on_gpu = device.type == "cuda"

    def load(where: torch.device) -> Any:
        model = load_model(model_directory(base_dir, model_dir), where, dtype)
        if not settings.lora.rank:
            return model
        from trainer.model import lora  # peft takes a while to import

        wrapped = lora.wrap(model, settings.lora)
        if where.type != "meta" and ADAPTER_CONFIG in files.listing(base_dir):
            lora.load_adapter(wrapped, base_dir)
        if on_gpu:
            for parameter in wrapped.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return wrapped

    if not layout.sharded:
        return Scorer(load(device), device, autocast=on_gpu)
    # Only one process holds the whole model, in host memory.
    source = load(torch.device("cpu")) if layout.rank == 0 else None
    model = load(torch.device("meta"))
    scorer = Scorer(model, device, offloaded=settings.cpu_offload and on_gpu)
    parallel.shard(scorer, model, layout, settings, on_gpu)
    parallel.fill(model, source, device, torch.device("cpu") if scorer.offloaded else device)
    return scorer


def model_directory(base_dir: Path, model_dir: Path | None) -> Path:
    """The directory of the model that `base_dir` holds, or holds an adapter for."""
    if ADAPTER_CONFIG not in files.listing(base_dir):
        return base_dir
    return model_dir or Path(json.loads(files.read(base_dir / ADAPTER_CONFIG))["base_model_name_or_path"])
