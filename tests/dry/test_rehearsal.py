"""The trainer's own step on GPUs that are not there: no wrong device or dtype, and memory as announced."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY
from trainer.memory import Shape, least_bytes
from trainer.settings import TrainerSettings

RECIPES = REPOSITORY / "scripts" / "recipes"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++ on Linux")
DEPTH = 2
"""Layers of a rehearsed model: memory is linear in them, and the time of a rehearsal too."""
QWEN3: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064,
    },
    "Qwen/Qwen3-30B-A3B": {
        **QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""From the configurations on the Hub."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gsm8k-1-gpu": ("Qwen/Qwen3-0.6B", 1, {}),
    "lora-8-gpus": ("Qwen/Qwen2.5-7B-Instruct", 8, {}),
    "qlora-1-gpu": ("Qwen/Qwen3-8B", 1, {}),
    "gsm8k-8-gpus": ("Qwen/Qwen3-8B", 8, {}),
    "offloaded": ("Qwen/Qwen3-8B", 1, {"layout": "sharded", "cpu_offload": True}),
    "hybrid": ("Qwen/Qwen3-8B", 16, {"layout": "hybrid"}),
    "tensor-parallel": ("Qwen/Qwen3-8B", 8, {"tensor_parallel_size": 2}),
    "context-parallel": ("Qwen/Qwen3-8B", 8, {"context_parallel": 2, "max_tokens_per_microbatch": 32_768}),
    "sharded-lora": ("Qwen/Qwen2.5-7B-Instruct", 8, {"layout": "sharded", "lora": {"rank": 16}}),
    "experts": ("Qwen/Qwen3-30B-A3B", 8, {}),
    "muon-tensor": ("Qwen/Qwen3-8B", 8, {"optimizer": "muon", "tensor_parallel_size": 2}),
    "kept": ("Qwen/Qwen3-0.6B", 1, {"activation_checkpointing": False}),
}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """guard.cpp, built."""
    out = tmp_path_factory.mktemp("guard") / "guard.so"
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations and COMPILER
    headers = f"-I{spec.submodule_search_locations[0]}/include"
    source = Path(__file__).with_name("guard.cpp")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-std=c++20", headers, source, "-o", out], check=True)
    return out


@pytest.fixture(scope="module")
def rehearsals(guard: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process that rehearses, a line for each."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.dry.rehearsal"],
        cwd=REPOSITORY,
        env={**os.environ, "GUARD": str(guard), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process


def make_model(path: Path, shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """A model directory of a real shape, whose weights take no room on the disk; returns their shapes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir()
    config = {"model_type": "qwen3", "num_hidden_layers": DEPTH, "dtype": "bfloat16", **shape}
    (path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    tied = {"lm_head.weight"} if shape.get("tie_word_embeddings") else set[str]()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}
    header, at = dict[str, Any](), 0
    for name, dimensions in shapes.items():
        size = 2 * torch.Size(dimensions).numel()
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return shapes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_training_takes_the_memory_that_is_announced(
    case: str, rehearsals: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    from coordinator.settings.loading import build
    from coordinator.settings.settings_file import read_file
    from coordinator.start import estimate

    model, gpus, more = CASES[case]
    file = RECIPES / f"{case}.toml"
    settings = build(read_file(file)).trainer if file.exists() else TrainerSettings(**more)
    tensors = make_model(tmp_path / "model", SHAPES[model])
    rank = settings.lora.rank
    adapters = rank * sum(estimate._adapted(tensors, settings.lora.targets)) if rank else 0
    sharing = 8 if settings.layout == "hybrid" else gpus
    announced = least_bytes(Shape.from_tensors(tensors, adapters), settings, sharing)
    assert rehearsals.stdin and rehearsals.stdout
    print(json.dumps([str(tmp_path / "model"), str(gpus), settings.model_dump_json()]), file=rehearsals.stdin)
    found = json.loads(rehearsals.stdout.readline())
    print(f"{case}: {found['peak'] / 1e9:.1f} GB, announced {announced / 1e9:.1f}")
    assert 0.85 * announced <= found["peak"] <= 1.15 * announced
    assert found["loading"] <= 1.05 * found["loaded"], "weights that are frozen are halved first"
    assert found["again"] <= 1.02 * found["peak"] and found["left"] < 0.01 * found["peak"]
    assert found["away"] == ["cpu"] and found["same"]
    assert found["back"] <= 1.01 * found["held"], "without the gradients, which are made anew"
    assert found["summed"] in (["cuda"], []) and found["written"] <= 1.02 * found["peak"]
    assert found["reused"], "fresh host memory costs ten times the copy"
