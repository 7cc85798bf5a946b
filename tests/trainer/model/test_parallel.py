"""One model in several layouts: the update is the same in all of them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from rollout.trajectory import Group
from scripts.tiny_models import make_tiny_model, tiny_config
from scripts.tiny_seeing_models import make_tiny_seeing
from tests.models import make_model
from tests.paths import REPOSITORY
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.model.learner import Learner, build_learner, fingerprint
from trainer.model.parallel import Layout, LayoutError, _tensor_plan, planned_module, shard
from trainer.model.slices import blank_model
from trainer.model.token_logprobs import Scorer
from trainer.settings import TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
JOB = Path(__file__).with_name("layout_job.py")
ROOT = REPOSITORY
SETTINGS: dict[str, Any] = {
    "learning_rate": 5e-4,
    "warmup_steps": 2,
    "global_batch_size": 16,
    "max_tokens_per_microbatch": 64,
    "kl": "k3",
    "kl_coefficient": 0.1,
}
COMPARED = ("loss", "entropy", "kl_engine", "kl_reference", "clip_fraction", "grad_norm", "mismatch_max")
PLAIN = {**SETTINGS, "kl": "off", "learning_rate": 1e-4}
SHARDED = {"layout": "sharded"}
TENSOR = {"tensor_parallel_size": 2}
HYBRID = {"layout": "hybrid"}
MUON: dict[str, Any] = {"optimizer": "muon", "eps": 0.1}
"""AdamW takes small steps on the smallest gradients, whose signs the rounding of Muon would decide."""
ADAPTERS: dict[str, Any] = {"lora": {"rank": 4}}
REWARD = {"kl": "k1", "kl_in": "reward", "advantage": "leave_one_out"}
REWARD_OF_TOKENS = {"kl": "k1", "kl_in": "token_reward", "advantage": "whitened"}
HALF = {"save_dtype": "bfloat16"}
"""Weights that are rounded where they are used."""
MIXED: dict[str, Any] = {"compute_dtype": "bfloat16"}
"""Settings as on GPUs: layers compute in bfloat16."""
IN_BFLOAT16: dict[str, dict[str, Any]] = {
    "replicated_mixed": MIXED,
    "sharded_mixed": MIXED | SHARDED,
    "tensor_mixed": MIXED | TENSOR,
    "sharded_context_mixed": MIXED | SHARDED | {"context_parallel": 2},
}
FAMILIES = {
    "gpt_oss": True,  # packed with masks
    "qwen3_next": False,  # a sequence a row
    "falcon_mamba": False,  # the same, found out by an error inside FSDP's hooks
}
"""Whether rows hold several sequences of these models."""
DIVIDED = ("llama", "qwen3_moe", "mistral", "deepseek_v3", "afmoe", "gpt_oss")
"""Families whose sequences two ranks share: experts, windows, latent attention, masks by name, sinks."""
UNDIVIDED = {
    "falcon": "RuntimeError: The size of tensor a",
    "qwen3_next": "scores are wrong by .*, as with recurrent layers",
}
"""Families in which they cannot, and what is said."""


def case(
    name: str,
    ranks: int,
    settings: dict[str, Any],
    model: str = "model",
    weights: Sequence[int] = (),
    on_node: Sequence[int] = (),
) -> dict[str, Any]:
    """A case of layout_job.py; by default the first rank gets twice as much as any other."""
    rank_weights = [*weights] or [2] + [1] * (ranks - 1)
    made = {"name": name, "model": model, "ranks": ranks, "rank_weights": rank_weights, "settings": settings}
    return made | ({"on_node": [*on_node]} if on_node else {})


CASES = [
    case("replicated", 3, SETTINGS),
    case("large", 3, SETTINGS | {"shard_from_parameters": 1000}, weights=[9, 1, 1]),
    case("tensor", 4, SETTINGS | TENSOR),
    case("sharded_context", 4, SETTINGS | SHARDED | {"context_parallel": 2}),
    case("hybrid", 4, SETTINGS | HYBRID, on_node=[2] * 4),
    case("replicated_half", 2, SETTINGS | HALF, weights=[1, 1]),
    case("sharded_half", 2, SETTINGS | SHARDED | HALF),
    case("tensor_half", 2, SETTINGS | TENSOR | HALF, weights=[1, 1]),
    # Of two heads for keys, four ranks need two copies.
    case("replicated_context_reward", 4, SETTINGS | REWARD | {"context_parallel": 4}),
    case("replicated_muon_reward", 3, SETTINGS | MUON | REWARD),
    case("sharded_muon_token_reward", 3, SETTINGS | SHARDED | MUON | REWARD_OF_TOKENS),
    case("tensor_muon_reward", 4, SETTINGS | TENSOR | MUON | REWARD),
    case("hybrid_tensor", 4, SETTINGS | HYBRID | TENSOR, on_node=[2] * 4),
    case("hybrid_context", 4, SETTINGS | HYBRID | {"context_parallel": 2}, on_node=[2] * 4),
    case("hybrid_muon_token_reward", 4, SETTINGS | HYBRID | MUON | REWARD_OF_TOKENS, on_node=[2] * 4),
    case("hybrid_adapters", 4, SETTINGS | HYBRID | ADAPTERS, on_node=[2] * 4),
    case("hybrid_half", 4, SETTINGS | HYBRID | HALF, on_node=[2] * 4),
]
OTHER_CASES = [
    *(case(family, 2, PLAIN | SHARDED, family) for family in FAMILIES),
    *(case(name, 2, PLAIN | more, weights=[1, 1]) for name, more in IN_BFLOAT16.items()),
    *(
        case(f"{family}_divided", 2, PLAIN | {"context_parallel": 2}, family, weights=[1, 1])
        for family in (*DIVIDED, *UNDIVIDED)
    ),
    case("experts_hybrid", 2, PLAIN | HYBRID, "qwen3_moe", weights=[1, 1], on_node=[1, 1]),
    case("uneven", 3, PLAIN | HYBRID, on_node=[2, 2, 1]),
]


@pytest.fixture(scope="module")
def small_batch(group: Callable[..., Group]) -> Batch:
    """Two steps: 32 sequences of 8 groups, with tokens that the model knows."""
    rng = np.random.default_rng(1)
    groups = [group(slot, [0.0, 1.0, 1.0, 0.5], rng) for slot in range(8)]
    batch = build_batch(groups, manifest_sha256="m", policy="p", temperature=1.0, seed=7)
    return replace(batch, token_ids=batch.token_ids % 48)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, small_batch: Batch) -> Path:
    """Directory of a finished layout_job over CASES."""
    directory = tmp_path_factory.mktemp("layouts")
    make_model(directory / "model", seed=0)
    make_model(directory / "reference", seed=1)
    (directory / "batch").write_bytes(small_batch.encode())
    for family in {*FAMILIES, *DIVIDED, *UNDIVIDED}:
        make_tiny_model(family, directory / family)
    # First those whose processes are forked, and must remember nothing.
    cases = sorted([*CASES, *OTHER_CASES], key=lambda case: "on_node" not in case)
    (directory / "cases.json").write_text(json.dumps(cases))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", JOB, directory], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def alone(job: Path, small_batch: Batch) -> Callable[[Mapping[str, Any]], tuple[Learner, list[Any]]]:
    """The training of a case in one process; once for each KL."""

    @cache
    def trained(changed: str) -> tuple[Learner, list[Any]]:
        settings = TrainerSettings(**SETTINGS | json.loads(changed))
        learner = build_learner(job / "model", CPU, settings)
        learner.load_reference(job / "reference", settings)
        stats = train(learner, small_batch, settings, max_tokens=24, report=lambda line: None)
        return learner, stats

    def of(case: Mapping[str, Any]) -> tuple[Learner, list[Any]]:
        layout = ("layout", "shard_from_parameters", "tensor_parallel_size", "context_parallel")
        changed = {name: value for name, value in case["settings"].items() if name not in layout}
        return trained(json.dumps(changed))

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_update_is_the_same_in_every_layout(
    job: Path, alone: Callable[[Mapping[str, Any]], tuple[Learner, list[Any]]], case: Mapping[str, Any]
) -> None:
    learner, stats = alone(case)
    # A last bit may decide how a weight is rounded.
    atol, rtol = (1e-3, 1e-2) if "half" in case["name"] else (3e-5, 1e-4)
    if "muon" in case["name"]:  # which rounds to bfloat16
        atol, rtol = 1e-4, 1e-3
    about = json.loads((job / f"{case['name']}.json").read_text())
    assert about["sharded"] == (not case["name"].startswith("replicated"))
    assert about["attention"] == ["split"]
    assert len(about["steps"]) == len(stats) == 2
    whole = load_file(job / f"{case['name']}.safetensors")
    assert whole.keys() == learner.parameters.keys(), "the model's own names"
    for name, value in whole.items():
        torch.testing.assert_close(value, learner.parameters[name].detach(), rtol=0, atol=atol)
    for mine, theirs in zip(stats, about["steps"], strict=True):
        for name in COMPARED:
            assert theirs[name] == pytest.approx(getattr(mine, name), rel=rtol, abs=1e-5), name
    apart = stats[1].kl_reference > 1e-6 if "adapters" in case["name"] else stats[0].kl_reference > 0.01
    assert apart and stats[0].mismatch_max > 1, "the model under adapters is their reference"


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_step_in_bfloat16_does_what_it_does_in_float32(job: Path, small_batch: Batch, name: str) -> None:
    """Within what bfloat16 resolves (8 bits), in a batch with large ratios. Tensor-parallel ranks round their
    parts of each sum once more."""
    settings = TrainerSettings(**PLAIN)
    stats = train(
        build_learner(job / "model", CPU, settings),
        small_batch,
        settings,
        max_tokens=24,
        report=lambda _: None,
    )
    about = json.loads((job / f"{name}.json").read_text())
    for mine, theirs in zip(stats, about["steps"], strict=True):
        assert theirs["loss"] != mine.loss and theirs["loss"] == pytest.approx(mine.loss, abs=0.02)
        assert theirs["entropy"] == pytest.approx(mine.entropy, rel=0.01)
        norm = pytest.approx(mine.grad_norm, rel=0.2 if name == "tensor_mixed" else 0.05)
        assert theirs["grad_norm"] == norm


def test_only_the_layers_compute_in_bfloat16(job: Path, small_batch: Batch) -> None:
    settings = TrainerSettings(**PLAIN | MIXED)
    learner = build_learner(job / "model", CPU, settings)
    seen: set[torch.dtype] = set()
    layer = learner.model.model.layers[0]
    layer.mlp.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    train(learner, small_batch, settings, max_tokens=24, report=lambda _: None)
    assert seen == {torch.bfloat16}
    kept = [*learner.parameters.values(), learner.gradients]
    kept += learner.optimizer.state[layer.mlp.up_proj.weight].values()
    assert {tensor.dtype for tensor in kept} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_need_help_in_rows_train_alike_sharded(
    job: Path, small_batch: Batch, family: str
) -> None:
    settings = TrainerSettings(**PLAIN)
    learner = build_learner(job / family, CPU, settings)
    stats = train(learner, small_batch, settings, max_tokens=24, report=lambda line: None)
    about = json.loads((job / f"{family}.json").read_text())
    assert about["sharded"] and about["packed"] == learner.arrangement.packing.several == FAMILIES[family]
    for mine, theirs in zip(stats, about["steps"], strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert theirs[name] == pytest.approx(getattr(mine, name), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("family", DIVIDED)
def test_two_ranks_share_the_sequences_of_a_family(job: Path, small_batch: Batch, family: str) -> None:
    settings = TrainerSettings(**PLAIN)
    learner = build_learner(job / family, CPU, settings)
    stats = train(learner, small_batch, settings, max_tokens=24, report=lambda line: None)
    about = json.loads((job / f"{family}_divided.json").read_text())
    for mine, theirs in zip(stats, about["steps"], strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert theirs[name] == pytest.approx(getattr(mine, name), rel=1e-5, abs=1e-6), name
    whole = load_file(job / f"{family}_divided.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(value, learner.parameters[name].detach(), rtol=0, atol=1e-5)


def test_nodes_that_hold_a_whole_model_each_may_ask_different_experts(job: Path, small_batch: Batch) -> None:
    settings = TrainerSettings(**PLAIN)
    learner = build_learner(job / "qwen3_moe", CPU, settings)
    stats = train(learner, small_batch, settings, max_tokens=24, report=lambda line: None)
    about = json.loads((job / "experts_hybrid.json").read_text())
    for mine, theirs in zip(stats, about["steps"], strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert theirs[name] == pytest.approx(getattr(mine, name), rel=1e-4, abs=1e-5), name
    for name, value in load_file(job / "experts_hybrid.safetensors").items():
        torch.testing.assert_close(value, learner.parameters[name].detach(), rtol=0, atol=1e-5)


def test_nodes_of_unequal_size_that_should_hold_a_whole_model_each_are_refused(job: Path) -> None:
    refusal = json.loads((job / "uneven.json").read_text())["refused"]
    assert refusal.startswith("trainer.layout=hybrid: nodes have 1 to 2 training processes")


@pytest.mark.parametrize("family", UNDIVIDED)
def test_family_whose_sequences_ranks_cannot_share_is_refused(job: Path, family: str) -> None:
    refusal = json.loads((job / f"{family}_divided.json").read_text())["refused"]
    assert re.fullmatch(rf"trainer.context_parallel=2 and \w+: {UNDIVIDED[family]}.*; use 1", refusal)


def test_temperatures_of_a_sharded_model_on_gpus_are_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3")).float()
    scorer = Scorer(model, CPU)
    scored: list[Any] = []
    score = Scorer._score

    def scoring(*given: Any, **more: Any) -> Any:
        scored.append(given)
        return score(*given, **more)

    monkeypatch.setattr(Scorer, "_score", scoring)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        settings = TrainerSettings(layout="sharded")
        shard(scorer, model, Layout.choose(10, settings, CPU), settings, on_gpu=True)
        ids = torch.arange(3, 19)[None]
        inputs = {"input_ids": ids, "position_ids": torch.arange(16)[None]}
        with torch.no_grad():
            scorer(inputs, torch.arange(15), ids[0, 1:], torch.full((15,), 0.7))
    finally:
        dist.destroy_process_group()
    ((_self, hidden, _targets, temperatures),) = scored
    assert hidden.dtype == torch.bfloat16 and torch.equal(temperatures, torch.full((15,), 0.7))


def test_embeddings_that_a_plan_would_split_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.17 to 5.20, which vLLM brings, plan so for models whose head is tied to the embeddings.
    config = Qwen3Config(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True
    )
    plan = {**(config.base_model_tp_plan or {}), "embed_tokens": "embedding_rowwise"}
    monkeypatch.setattr(Qwen3Config, "base_model_tp_plan", plan)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = _tensor_plan(model, Layout(0, 2, 2, sharded=True))
    assert "layers.*.self_attn.q_proj" in found and "embed_tokens" not in found


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_plan_of_a_model_that_sees_splits_its_decoder(family: str, tmp_path: Path) -> None:
    """Its names were looked for beside the tower: no layer was split, and nobody noticed."""
    model, _ = blank_model(make_tiny_seeing(family, tmp_path / family), torch.float32)
    names = {name for name, _ in planned_module(model).named_modules()}
    plan = _tensor_plan(model, Layout(world_size=2, tensor_parallel_size=2))
    assert plan and all(pattern.replace("*", "1") in names for pattern in plan)


def test_context_group_that_the_processes_cannot_form_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"trainer.context_parallel=2 does not divide the 1 training proc"):
        Layout.choose(1000, TrainerSettings(context_parallel=2), CPU)


def test_sharded_layout_without_a_job_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"trainer.layout=sharded needs a process group"):
        Layout.choose(1000, TrainerSettings(layout="sharded"), CPU)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layout": "replicated", "tensor_parallel_size": 2}, "tensor_parallel_size=2 shards the model"),
        ({"layout": "replicated", "cpu_offload": True}, "cpu_offload=true is for a sharded model"),
        ({"lora": {"rank": 4}, "tensor_parallel_size": 2}, "adapters are not split"),
        (
            {"context_parallel": 2, "tensor_parallel_size": 2},
            "does not go with trainer.tensor_parallel_size=2",
        ),
        ({"context_parallel": 2, "compile": True}, "does not go with trainer.compile=true"),
        ({"keep_alive": False, "save_interval": 2}, "would repeat the training"),
        ({"algorithm": "gspo", "kl": "k1", "kl_in": "reward"}, "kl_in=reward with .*=standardised"),
        ({"algorithm": "maxrl", "kl": "k1", "kl_in": "reward"}, "kl_in=reward with .*=success"),
        ({"algorithm": "maxrl", "overlong": "penalise"}, "a penalty makes rewards"),
        ({"betas": [2, 3]}, "betas=2,3: each must lie in"),
        ({"algorithm": [1]}, "trainer.algorithm=.1.: there is default, grpo"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainerSettings(**given)


def test_fingerprint_tells_replicas_apart_that_differ_in_the_last_bit_of_a_weight() -> None:
    weights = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    drifted, swapped, up_and_down = weights.clone(), weights.clone(), weights.clone()
    drifted[7, 3] = torch.nextafter(drifted[7, 3], torch.tensor(9.0))
    swapped[[1, 2]] = weights[[2, 1]]
    up_and_down.view(-1).view(torch.int32)[5] += 1
    up_and_down.view(-1).view(torch.int32)[6] -= 1
    prints = [int(fingerprint(each)) for each in (weights, drifted, swapped, up_and_down)]
    assert len(set(prints)) == 4 and prints[0] == int(fingerprint(weights.clone()))


def test_tensor_group_has_the_weight_of_its_ranks() -> None:
    layout = Layout(rank=3, world_size=6, tensor_parallel_size=2, sharded=True)
    assert layout.data_rank == 1
    assert layout.data_weights([2, 1, 1, 1, 0.5, 1]) == [3, 2, 1.5]
    with pytest.raises(LayoutError, match="2 rank weights for 6 ranks"):
        layout.data_weights([1, 1])


def test_large_model_of_a_single_rank_is_not_sharded() -> None:
    assert not Layout.choose(10**12, TrainerSettings(), CPU).sharded
