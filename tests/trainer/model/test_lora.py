"""Adapters: what is trained of a model, and that peft and transformers load what is written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.engines.model_dir import WeightsError
from tests.adapters import save_adapter
from tests.models import LLAMA_LIKE, make_model
from trainer.model import lora, tiny_seeing
from trainer.model.lora import LoraError
from trainer.settings import LoraSettings

SETTINGS = LoraSettings(rank=4, alpha=12.0)
TOKENS = torch.arange(3, 23).reshape(2, 10)
# peft asks transformers by a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"), seed=0)


def base_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def trained(model: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def model(base_dir: Path) -> Iterator[Any]:
    """A model whose adapters have been trained for three steps."""
    model = lora.wrap(base_model(base_dir), SETTINGS)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=0.02)
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model


@pytest.fixture(scope="module")
def adapter_dir(model: Any, base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    tensors = {name: tensor.detach() for name, tensor in trained(model).items()}
    save_adapter(model, tensors, directory, base_dir)
    AutoTokenizer.from_pretrained(base_dir).save_pretrained(directory)
    return directory


def test_new_adapters_change_nothing_are_alone_trained_and_alike_in_every_process(base_dir: Path) -> None:
    before = torch.get_rng_state()
    plain = base_model(base_dir)
    models = [lora.wrap(base_model(base_dir), SETTINGS) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(models[0]), logits(plain))
    names = set(trained(models[0]))
    assert len(names) == 2 * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert all(torch.equal(a, b) for a, b in zip(*(trained(m).values() for m in models), strict=True))
    assert all(tensor.any() for name, tensor in trained(models[0]).items() if ".lora_A." in name)


def test_adapters_are_float32_over_weights_in_bfloat16(base_dir: Path) -> None:
    model = lora.wrap(base_model(base_dir, torch.bfloat16), SETTINGS)
    assert {tensor.dtype for tensor in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16


def test_trained_adapters_are_loaded_by_peft_and_by_transformers_alike(
    model: Any, base_dir: Path, adapter_dir: Path
) -> None:
    from peft import PeftModel  # slow to import

    wanted = logits(model)
    assert (wanted - logits(base_model(base_dir))).abs().max() > 0.1
    by_peft: Any = PeftModel.from_pretrained(base_model(base_dir), str(adapter_dir))
    assert (logits(by_peft) - wanted).abs().max() < 1e-6
    assert (logits(base_model(adapter_dir)) - wanted).abs().max() < 1e-6
    assert (logits(by_peft.merge_and_unload()) - wanted).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(adapter_dir).encode("1+2") == [4, 13, 5]


def test_written_files_are_those_of_peft_itself(model: Any, adapter_dir: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    ours, theirs = (
        safetensors.torch.load_file(directory / "adapter_model.safetensors")
        for directory in (adapter_dir, tmp_path)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    about, wanted = (
        json.loads((directory / "adapter_config.json").read_text()) for directory in (adapter_dir, tmp_path)
    )
    targets = about.pop("target_modules"), wanted.pop("target_modules")
    assert set(targets[0]) == set(targets[1]) and about == wanted


def test_without_its_adapters_the_policy_is_the_reference(model: Any, base_dir: Path) -> None:
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base_model(base_dir)))
    assert (logits(model) - logits(base_model(base_dir))).abs().max() > 0.1
    assert len(trained(model)) == 28


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (LoraSettings(rank=8, alpha=12.0), r"trained with trainer\.lora\.rank=4, now it is 8"),
        (LoraSettings(rank=4, alpha=4.0), r"trainer\.lora\.alpha=12\.0, now it is 4\.0"),
        (LoraSettings(rank=4, alpha=12.0, targets="q_proj"), r"trainer\.lora\.targets=.*, now it is q_proj"),
    ],
)
def test_checkpoint_of_other_settings_is_refused(
    settings: LoraSettings, reason: str, base_dir: Path, adapter_dir: Path
) -> None:
    with pytest.raises(LoraError, match=reason):
        lora.load_adapter(lora.wrap(base_model(base_dir), settings), adapter_dir)


def test_checkpoint_that_lacks_a_tensor_or_is_damaged_is_refused(
    base_dir: Path, adapter_dir: Path, tmp_path: Path
) -> None:
    model = lora.wrap(base_model(base_dir), SETTINGS)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(adapter_dir / file.name)
    name = next(iter(tensors))
    safetensors.torch.save_file({key: tensors[key] for key in tensors if key != name}, file)
    (tmp_path / "adapter_config.json").write_bytes((adapter_dir / "adapter_config.json").read_bytes())
    with pytest.raises(LoraError, match=f"'{name}' has shape None"):
        lora.load_adapter(model, tmp_path)
    file.write_bytes((adapter_dir / file.name).read_bytes()[:-1])
    with pytest.raises(WeightsError, match="its header describes"):
        lora.load_adapter(model, tmp_path)


def test_target_that_no_module_has_is_refused(base_dir: Path) -> None:
    for targets in ("nothing", "q_proj,nothing"):
        with pytest.raises(LoraError, match=rf"trainer\.lora\.targets={targets}: .*nothing"):
            lora.wrap(base_model(base_dir), LoraSettings(rank=4, targets=targets))
    named = lora.wrap(base_model(base_dir), LoraSettings(rank=4, targets="q_proj, v_proj"))
    assert len(trained(named)) == 2 * 2 * 2


def moe(name: str, **more: Any) -> Any:
    """A model whose router is made of linear layers, which peft's all-linear would adapt."""
    config = getattr(transformers, name)(**LLAMA_LIKE, num_experts_per_tok=1, **more)
    return AutoModelForCausalLM.from_config(config).float()


@pytest.mark.parametrize(
    ("name", "more", "router"),
    [
        pytest.param("PhimoeConfig", {"num_local_experts": 4}, "router", id="the router is a linear layer"),
        pytest.param(
            "JetMoeConfig",
            {"num_local_experts": 4, "kv_channels": 8},
            "router.layer",
            id="the router holds one",
        ),
    ],
)
def test_router_of_experts_gets_an_adapter_only_by_name(name: str, more: dict[str, Any], router: str) -> None:
    everywhere = set(lora.wrap(moe(name, **more), LoraSettings(rank=4)).targeted_module_names)
    assert any("attn" in module or "attention" in module for module in everywhere)
    assert not any("router" in module for module in everywhere)
    by_name = lora.wrap(moe(name, **more), LoraSettings(rank=4, targets=router)).targeted_module_names
    assert by_name and all(module.endswith(router) for module in by_name)


@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "MixtralConfig", "DeepseekV3Config"])
def test_all_linear_leaves_out_fused_experts_which_no_engine_serves(name: str) -> None:
    wrapped = lora.wrap(moe(name), LoraSettings(rank=4))
    assert trained(wrapped) and not any("experts" in parameter for parameter in trained(wrapped))
    config = wrapped.peft_config[lora.ADAPTER]
    assert not (config.target_parameters or config.rank_pattern or config.alpha_pattern)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj"])
def test_vision_tower_and_projector_get_adapters_only_if_they_are_trained(targets: str) -> None:
    settings = LoraSettings(rank=4, targets=targets)
    frozen, free = (lora.wrap(tiny_seeing.make_model(0), settings, freezes) for freezes in (True, False))
    vision = {name for name in trained(free) if "vision_tower" in name or "multi_modal_projector" in name}
    assert vision and set(trained(frozen)) == set(trained(free)) - vision


def test_adapters_of_the_tower_alone_are_refused_while_it_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match=r"'fc1' is in the vision tower .*freeze_vision=false"):
        lora.wrap(tiny_seeing.make_model(0), LoraSettings(rank=4, targets="q_proj,fc1"))
    whole = lora.wrap(tiny_seeing.make_model(0), SETTINGS, freeze_vision=False)
    save_adapter(
        whole, {name: tensor.detach() for name, tensor in trained(whole).items()}, tmp_path, tmp_path
    )
    with pytest.raises(LoraError, match=r"trained with trainer.freeze_vision=false, now it is true; give"):
        lora.load_adapter(lora.wrap(tiny_seeing.make_model(0), SETTINGS), tmp_path)
    lora.load_adapter(whole, tmp_path)
