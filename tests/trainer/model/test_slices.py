"""Sharded models whose ranks read their own parts of the files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines.model_dir import WeightsError
from scripts.tiny_models import make_tiny_model
from tests.models import GPT2_LIKE, LLAMA_LIKE
from tests.paths import REPOSITORY
from tests.trainer.model.slices_job import LAYOUTS
from trainer.model.loading import build_scorer
from trainer.model.parallel import Layout
from trainer.model.slices import blank_model
from trainer.settings import TrainerSettings

JOB = Path(__file__).with_name("slices_job.py")
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "gemma3_text": {},
    "olmo3": {},
    "phi3": {},
    "gpt2": {},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 3},
    "lfm2": {},
    "falcon_h1": {
        **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        "ssm_multipliers": [0.5, 1.5, 2.0, 2.5, 3.0],  # a buffer whose value comes from a module around it
    },
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
}
"""Merged experts, convolutions, biases, tied and untied heads, positions of several kinds."""
ADAPTED = ("qwen3", "qwen3_moe")


def make(directory: Path, family: str, **more: Any) -> Path:
    torch.manual_seed(0)
    given = GPT2_LIKE if family == "gpt2" else LLAMA_LIKE
    config = AutoConfig.for_model(family, **{**given, **FAMILIES[family], **more})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model of each family, and with some that are odd."""
    root = tmp_path_factory.mktemp("slices")
    for family in FAMILIES:
        make(root / "models" / family, family)
    for name, times in (("tied_twice", 1.0), ("tied_but_differs", 2.0)):
        path = make(root / "models" / name, "qwen3") / "model.safetensors"
        tensors = load_file(path)
        tensors["lm_head.weight"] = times * tensors["model.embed_tokens.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
    torch.manual_seed(0)
    path = make(root / "models" / "bfloat16_in_shards", "llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="20kB")
    assert len(list(path.glob("*.safetensors"))) > 2
    (root / "adapters").mkdir()
    for name in ADAPTED:
        (root / "adapters" / name).symlink_to(root / "models" / name)
    return root


@pytest.fixture(scope="module")
def found(models: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank has found, by layout."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, JOB, models], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        layout: [json.loads((models / f"{layout}_{rank}.json").read_text()) for rank in range(ranks)]
        for layout, (ranks, _) in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_what_transformers_loads_whole_and_adapters_are_the_same_on_every_rank(
    models: Path, found: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    adapters = {f"adapters/{name}" for name in ADAPTED if layout == "fsdp"}
    names = {f"models/{path.name}" for path in (models / "models").iterdir()}
    first = found[layout][0]
    assert first.keys() == names | adapters
    refused = {name for name in names if "refused" in first[name]}
    assert not refused or (layout == "tensor" and len(names - refused) > 5), refused
    for rank in found[layout]:
        assert all(rank[name]["differs"] == [] for name in adapters)
        for name in names - refused:
            assert rank[name]["differs"] == [], name
            assert rank[name]["held"] <= rank[name]["read"] < rank[name]["held"] + 5000, "and its buffers"


def test_config_is_there_though_a_call_of_transformers_on_the_mount_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = make(tmp_path / "model", "qwen3"), os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: "/model/" not in str(path) and real(path))
    assert blank_model(model, torch.float32)[0].config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "up_proj"), ("deepseek_v3", "e_score_correction_bias")]
)
def test_model_without_one_of_its_tensors_is_refused(tmp_path: Path, family: str, part: str) -> None:
    path = make_tiny_model(family, tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if part in name)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=rf"no values for 1 tensors .*'{name}'"):
        blank_model(tmp_path / "model", torch.float32)
    with pytest.raises(WeightsError, match=rf"no values for 1 tensors .*'{name}'"):
        build_scorer(tmp_path / "model", torch.device("cpu"), TrainerSettings(), Layout(), torch.float32)
