"""Proofs in vLLM's workers, here without vLLM; tests/engines/test_proof.py has a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rollout.engines import vllm_worker
from rollout.engines.content import WrongContent
from rollout.engines.vllm_worker import WorkerExtension

OWN, HUB_ID = "a-user/tiny", "models--a-user--tiny"


class Model(torch.nn.Module):
    """A layer and a head; its loader adds one to the layer's weight, as some families' do to norms."""

    def __init__(self, layer: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.LayerNorm(3, bias=False)])
        self.head = torch.nn.Linear(3, 2, bias=False)
        self.load_state_dict({"layers.0.weight": layer + 1, "head.weight": head})


class Worker(WorkerExtension):
    rank = 0

    def get_model(self) -> Model:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model

    def __init__(self, model: Model, name: str, cache: Path) -> None:
        self.model = model
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model=name, revision=None, dtype=torch.float32),
            load_config=SimpleNamespace(download_dir=str(cache)),
            parallel_config=SimpleNamespace(world_size=1),
        )


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(3, generator=generator),
        "head.weight": torch.randn(2, 3, generator=generator),
    }


def save(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache in which the model is, as `vllm serve` leaves it."""
    monkeypatch.setattr(vllm_worker, "_world", lambda: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "another"))
    save(tmp_path / "hub" / HUB_ID / "snapshots" / "abc", weights(0))
    (tmp_path / "hub" / HUB_ID / "refs").mkdir()
    (tmp_path / "hub" / HUB_ID / "refs" / "main").write_text("abc")
    return tmp_path / "hub"


def test_server_of_a_hub_model_finds_out_what_its_loader_changes(cache: Path, tmp_path: Path) -> None:
    worker = Worker(Model(*weights(0).values()), OWN, cache)
    assert worker.prove_content() == ["layers.0"]
    new = save(tmp_path / "new", weights(1))
    worker.model = Model(*weights(1).values())
    assert worker.prove_content(str(new)) == ["layers.0"]
    worker.model = Model(weights(1)["layers.0.weight"], weights(0)["head.weight"])
    with pytest.raises(WrongContent, match=r"outside of the layers: head\.weight is"):
        worker.prove_content(str(new))


@pytest.mark.parametrize("name", ["a-user/another", "s3://bucket/model", "/gone/away"])
def test_server_of_a_model_that_is_nowhere_here_leaves_nothing_out(
    cache: Path, tmp_path: Path, name: str
) -> None:
    worker = Worker(Model(*weights(0).values()), name, cache)
    assert worker.prove_content() == []
    with pytest.raises(WrongContent, match=r"layers\.0\.weight is"):
        worker.prove_content(str(save(tmp_path / "same", weights(0))))
