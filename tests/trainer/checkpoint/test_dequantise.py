"""Quantised weights as numbers: what is written is what the scales and the weights say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.engines.embedded.weights import load_model
from rollout.engines.model_facts import quantisation
from scripts.tiny_models import make_tiny_model
from trainer.checkpoint import dequantise

FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def as_shipped(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return directory


def fp8_model(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """A model in FP8 with a scale for each 16 x 16, and the numbers that it stands for."""
    tensors = load_file(make_tiny_model("qwen3", directory) / "model.safetensors")
    meant: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = (size // 16 for size in tensors[name].shape)
        scales = 2.0 ** torch.randint(-3, 3, (rows, columns))
        weight = tensors[name].to(torch.float8_e4m3fn)
        meant[name] = weight.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors |= {name: weight, f"{name}_scale_inv": scales}
    return as_shipped(directory, tensors, FP8_CONFIG), meant


def mxfp4_model(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """A model whose experts are in MXFP4, as gpt-oss ships them, and the numbers that they stand for."""
    tensors = load_file(make_tiny_model("gpt_oss", directory) / "model.safetensors")
    meant: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        halves = torch.stack([FP4[(blocks & 15).int()], FP4[(blocks >> 4).int()]], -1).flatten(-2)
        numbers = halves * 2.0 ** (scales.float() - 127)[..., None]
        meant[name] = numbers.flatten(-2).transpose(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return as_shipped(directory, tensors, {"quant_method": "mxfp4"}), meant


@pytest.mark.parametrize("make", [fp8_model, mxfp4_model])
def test_numbers_are_what_weights_and_scales_say(make: Any, tmp_path: Path) -> None:
    quantised, meant = make(tmp_path / "quantised")
    dequantise.dequantise(quantised, tmp_path / "out")
    assert quantisation(tmp_path / "out") is None and (tmp_path / "out" / "tokenizer.json").exists()
    found = dict(load_model(tmp_path / "out", torch.float32).named_parameters())
    assert meant and all(
        torch.equal(found[name], value.to(torch.bfloat16).float()) for name, value in meant.items()
    )


def test_what_is_not_quantised_so_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model("qwen3", tmp_path / "model")
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["dequantise", str(model), str(tmp_path / "out")])
    assert dequantise.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "quantised: no; fp8 and mxfp4" in line
    assert not (tmp_path / "out").exists()
