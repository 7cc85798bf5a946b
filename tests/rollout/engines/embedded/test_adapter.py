"""Adapters merged into the embedded engine's model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.engines.embedded.adapter import MergedAdapter
from rollout.engines.model_dir import WeightsError
from tests.adapters import make_adapter

Q_PROJ, UP_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "adapter", model_dir, seed=0, rank=4)


def load_model(model_dir: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def altered(source: Path, target: Path, tensors: dict[str, Tensor] | None = None, **config: object) -> Path:
    shutil.copytree(source, target)
    if tensors is not None:
        safetensors.torch.save_file(tensors, target / "adapter_model.safetensors")
    about = target / "adapter_config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **config}))
    return target


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_layer_gets_its_own_weight_and_the_scaled_product(
    model_dir: Path, adapter_dir: Path, tmp_path: Path, rslora: bool, scale: float
) -> None:
    model = load_model(model_dir)
    before = weights(model)
    MergedAdapter(model).load(altered(adapter_dir, tmp_path / "adapter", use_rslora=rslora))
    tensors = safetensors.torch.load_file(adapter_dir / "adapter_model.safetensors")
    for layer in (Q_PROJ, UP_PROJ):
        a, b = (tensors[f"base_model.model.{layer}.lora_{x}.weight"].double() for x in "AB")
        wanted = before[f"{layer}.weight"] + scale * b @ a
        assert torch.allclose(model.state_dict()[f"{layer}.weight"], wanted, rtol=0, atol=1e-12)
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_next_adapter_is_added_to_the_models_own_weights(
    model_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    second = make_adapter(tmp_path / "second", model_dir, seed=1, targets="q_proj")
    fresh, used = load_model(model_dir), load_model(model_dir)
    before = weights(used)
    adapter = MergedAdapter(used)
    adapter.load(adapter_dir)
    adapter.load(second)
    MergedAdapter(fresh).load(second)
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in weights(used).items())
    assert torch.equal(used.state_dict()[f"{UP_PROJ}.weight"], before[f"{UP_PROJ}.weight"])


def test_product_is_computed_in_float32_for_a_model_in_bfloat16(model_dir: Path, adapter_dir: Path) -> None:
    exact, rounded = load_model(model_dir, torch.float32), load_model(model_dir, torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    for model in (exact, rounded):
        MergedAdapter(model).load(adapter_dir)
    name = f"{Q_PROJ}.weight"
    assert torch.equal(rounded.state_dict()[name], exact.state_dict()[name].bfloat16())


def test_adapter_that_is_not_a_plain_sum_or_does_not_fit_is_refused_and_changes_nothing(
    model_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    model = load_model(model_dir)
    adapter = MergedAdapter(model)
    adapter.load(adapter_dir)
    before = weights(model)
    tensors = safetensors.torch.load_file(adapter_dir / "adapter_model.safetensors")
    a, b = f"base_model.model.{UP_PROJ}.lora_A.weight", f"base_model.model.{UP_PROJ}.lora_B.weight"
    elsewhere = {name.replace("up_proj", "down_proj_"): tensor for name, tensor in tensors.items()}
    norm = {name.replace("mlp.up_proj", "input_layernorm"): tensor for name, tensor in tensors.items()}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"use_dora": True}, "use_dora=True is not supported by the embedded engine"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"of_tomorrow": 1}, "of_tomorrow=1"),
        ({"r": float("inf")}, "gives no r and lora_alpha"),
        ({"r": 0}, "gives no r and lora_alpha"),
        ({"tensors": {name: tensor for name, tensor in tensors.items() if name != a}}, "is not a pair"),
        ({"tensors": {**tensors, "x": tensors[a].clone()}}, "'x' is not a pair"),
        ({"tensors": {**tensors, b: tensors[b][:-1].clone()}}, r"the model's weight there is \(128, 64\)"),
        ({"tensors": {**tensors, a: tensors[a][:-1].clone()}}, "the model's weight there is"),
        ({"tensors": elsewhere}, "the model has no layer 'model.layers.0.mlp.down_proj_'"),
        ({"tensors": norm}, "is a Qwen3RMSNorm; the embedded engine takes adapters of linear layers only"),
    ]
    for number, (change, reason) in enumerate(refused):
        with pytest.raises(WeightsError, match=reason):
            adapter.load(altered(adapter_dir, tmp_path / str(number), **change))
    unnamed = altered(adapter_dir, tmp_path / "unnamed")
    (unnamed / "adapter_model.safetensors").rename(unnamed / "other.safetensors")
    with pytest.raises(WeightsError, match=r"holds no adapter_model\.safetensors, so"):
        adapter.load(unnamed)
    with pytest.raises(WeightsError, match="it is not an adapter"):
        adapter.load(model_dir)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
