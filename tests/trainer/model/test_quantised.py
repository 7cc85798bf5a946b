"""QLoRA: adapters over a model in 4 bits compute and learn as over a model of the rounded weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollout.engines.embedded.weights import load_model
from trainer.batch.batch import Batch
from trainer.checkpoint import checkpoint
from trainer.checkpoint.probe import probe_document, probe_logprobs
from trainer.checkpoint.state import StateSaver
from trainer.documents import TrainRequest
from trainer.memory import NF4_BYTES
from trainer.model import lora, quantised, tiny_seeing
from trainer.model.learner import Learner, build_learner
from trainer.model.lora import LoraError
from trainer.model.quantised import Quantised
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import train
from trainer.update.step_stats import StepStats

CPU = torch.device("cpu")
QLORA = TrainerSettings(
    lora=LoraSettings(rank=4, base_dtype="nf4"), learning_rate=3e-3, warmup_steps=1, global_batch_size=16
)
PLAIN = QLORA.model_copy(update={"lora": LoraSettings(rank=4)})
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def quantised_layers(learner: Learner) -> dict[str, Quantised]:
    modules = learner.scorer.causal.named_modules()
    return {name: module for name, module in modules if isinstance(module, Quantised)}


def trained(learner: Learner, batch: Batch, settings: TrainerSettings = QLORA) -> list[StepStats]:
    return train(learner, batch, settings, max_tokens=32, report=lambda _: None)


def test_layers_are_held_in_4_bits_and_embeddings_norms_and_adapters_are_not(base_dir: Path) -> None:
    learner = build_learner(base_dir, CPU, QLORA)
    layers = quantised_layers(learner)
    whole = dict(load_model(base_dir, torch.float32).named_parameters())
    linear = {name for name, tensor in whole.items() if ".layers." in name and tensor.ndim == 2}
    assert {f"{name.removesuffix('.base_layer')}.weight" for name in layers} == linear
    held = sum(layer.codes.nbytes + layer.scales.nbytes for layer in layers.values())
    assert held / sum(whole[name].numel() for name in linear) == pytest.approx(NF4_BYTES, rel=0.01)
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in learner.parameters.items())
    for name, layer in layers.items():
        exact = whole[f"{name.removesuffix('.base_layer')}.weight"]
        assert 0 < (layer.weight - exact).abs().mean() < 0.15 * exact.abs().mean()


def test_vision_tower_stays_exact() -> None:
    model = lora.wrap(tiny_seeing.make_model(0), QLORA.lora)
    quantised.quantise(model, CPU)
    names = [name for name, module in model.named_modules() if isinstance(module, Quantised)]
    assert len(names) == 14 and not any("vision_tower" in name for name in names)


def test_training_is_that_over_a_dense_model_of_the_rounded_weights(base_dir: Path, batch: Batch) -> None:
    """The loss, its gradients and the adapters after three steps."""
    learner, dense = build_learner(base_dir, CPU, QLORA), build_learner(base_dir, CPU, PLAIN)
    with torch.no_grad():
        for name, layer in quantised_layers(learner).items():
            dense.scorer.causal.get_submodule(name).weight.copy_(layer.weight)
    one, other = trained(learner, batch), trained(dense, batch, PLAIN)
    assert [step.loss for step in one] == pytest.approx([step.loss for step in other], abs=1e-5)
    assert [step.grad_norm for step in one] == pytest.approx([step.grad_norm for step in other], rel=1e-5)
    for name, parameter in learner.parameters.items():
        torch.testing.assert_close(parameter, dense.parameters[name], rtol=0, atol=1e-5)
    assert one[0].grad_norm > 0 and one[0].kl_engine == pytest.approx(other[0].kl_engine, abs=1e-5)


def test_it_learns_and_without_adapters_it_is_the_base_in_4_bits(base_dir: Path, batch: Batch) -> None:
    settings = QLORA.model_copy(update={"clip": "likelihood", "advantage": "one", "learning_rate": 0.02})
    learner = build_learner(base_dir, CPU, settings)
    steps = [step for _ in range(4) for step in trained(learner, batch, settings)]
    assert steps[-1].loss < 0.9 * steps[0].loss
    base = probe_logprobs(build_learner(base_dir, CPU, settings), range(3, 23))
    assert probe_logprobs(learner, range(3, 23)) != base
    with learner.model.disable_adapter():
        assert probe_logprobs(learner, range(3, 23)) == base


def test_run_goes_on_bit_for_bit_from_adapters_alone(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    request = make_request(batch).model_copy(update={"settings": QLORA})
    learner = checkpoint.load(Path(request.base_dir), request.base_policy, CPU, QLORA)
    trained(learner, batch)
    saver = StateSaver(timeout_s=60)
    out = Path(request.staging_dir)
    result = checkpoint.write(learner, out, request, 3, {"loss": 0.0}, saver, probe=range(3, 20))
    saver.finish()
    assert (out / "adapter_model.safetensors").exists() and not list(out.glob("model*.safetensors"))
    resumed = checkpoint.load(out, result.policy, CPU, QLORA)
    for each in (learner, resumed):
        trained(each, batch)
    for name, parameter in learner.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
    assert '"computed_in": "nf4"' in (out / "probe.json").read_text()
    assert '"computed_in": "float32"' in probe_document(
        build_learner(Path(request.base_dir), CPU, PLAIN), [3, 4]
    )


def test_bias_is_added_and_routers_of_experts_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Module()
    layer.proj, layer.gate = nn.Linear(64, 32), nn.Linear(64, 4)
    layer.requires_grad_(False)
    monkeypatch.setattr(quantised, "decoder_layers", lambda model: [model])
    quantised.quantise(layer, CPU)
    proj: Any = layer.proj
    inputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert type(layer.gate) is nn.Linear and isinstance(proj, Quantised)
    torch.testing.assert_close(proj(inputs), inputs @ proj.weight.T + proj.bias)


def test_without_bitsandbytes_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(
        LoraError, match=r"^trainer.lora.base_dtype=nf4 needs bitsandbytes: pip install .*qlora"
    ):
        lora.wrap(None, QLORA.lora)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"lora": {"base_dtype": "nf4"}}, "with trainer.lora.rank=0: .* add trainer.lora.rank=16"),
        ({"layout": "sharded"}, "with trainer.layout=sharded: each rank holds the whole model"),
        ({"cpu_offload": True}, "with trainer.cpu_offload=true: that is for a sharded model"),
        ({"tensor_parallel_size": 2}, "adapters are not split"),
    ],
)
def test_layouts_that_need_other_numbers_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainerSettings.model_validate({"lora": {"rank": 4, "base_dtype": "nf4"}, **more})
