"""Models that change the frequencies of all positions with a call's longest sequence: they do not here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.weights import load_model
from rollout.engines.kinds.choice import any_kind
from rollout.engines.kinds.kind import ServerSettingError
from rollout.engines.kinds.vllm import Vllm
from rollout.settings import EngineSettings
from scripts.tiny_models import make_tiny_model

STEADY = 16
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16, "original_max_position_embeddings": STEADY,
    },
    "original_max_position_embeddings": STEADY, "max_position_embeddings": 128,
}  # fmt: skip
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": STEADY,
}


@pytest.fixture(params=[("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, more = request.param
    make_tiny_model(family, tmp_path / "model", **more)
    return tmp_path / "model"


def test_neighbour_that_is_long_changes_nothing(model_dir: Path) -> None:
    model: Any = load_model(model_dir, torch.float32)
    ids = torch.arange(2, 2 + 3 * STEADY)[None]

    def first(length: int) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids[:, :length]).logits[0, :STEADY]

    assert torch.allclose(first(STEADY), first(3 * STEADY), atol=1e-4)


def test_no_engine_takes_longer_sequences(model_dir: Path) -> None:
    assert EmbeddedEngine(model_dir, dtype=torch.float32, max_batch=2).max_model_len == STEADY
    argv = Vllm(EngineSettings(), gpus=1).command(model_dir, "/tmp/s").argv
    assert f"--max-model-len={STEADY}" in argv


def test_longer_context_for_vllm_is_refused(model_dir: Path) -> None:
    with pytest.raises(ServerSettingError, match=r"args\.max_model_len=64: beyond 16 tokens.*give 16"):
        any_kind(EngineSettings(args={"max_model_len": 64})).context(model_dir)
    assert any_kind(EngineSettings(args={"max_model_len": 9})).context(model_dir) == 9
