"""The embedded engine proves what it computes with: any one tensor that is a step behind is found."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.engines import content
from rollout.engines.admin import EngineAdmin, WrongWeights
from rollout.engines.content import WrongContent
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.model_dir import WeightsError
from tests.adapters import make_adapter
from tests.models import make_model, stepped
from tests.rollout.rollout_helpers import RunningServer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
KINDS = {
    "fused": "model.layers.0.self_attn.k_proj.weight",
    "tied": "model.embed_tokens.weight",
    "norm": "model.layers.1.input_layernorm.weight",
    "expert": "model.layers.1.mlp.experts.gate_up_proj",
    "router": "model.layers.1.mlp.gate.weight",
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "old", seed=0, experts=4)


@pytest.fixture(scope="module")
def new(old: Path) -> Path:
    return stepped(old, old.parent / "new")


@pytest.fixture(scope="module")
def engine(old: Path) -> EmbeddedEngine:
    return started(old, torch.float64)


def started(model: Path, dtype: torch.dtype) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, dtype=dtype, max_batch=4)
    engine.start()
    return engine


def parameters(engine: EmbeddedEngine) -> dict[str, Any]:
    return dict(engine._batch.model.named_parameters())


def prove(engine: EmbeddedEngine, *directories: Path | None) -> list[str]:
    model, adapter = (*directories, None, None)[:2]
    return engine.prove(model, adapter).result()


def test_engine_proves_what_it_was_started_with_and_what_it_loads(
    engine: EmbeddedEngine, old: Path, new: Path
) -> None:
    engine.reload(old).result()
    assert prove(engine) == prove(engine, old) == []
    with pytest.raises(WrongContent):
        prove(engine, new)
    engine.reload(new).result()
    assert prove(engine, new) == []


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_tensor_that_is_a_step_behind_is_found_and_named(
    engine: EmbeddedEngine, old: Path, new: Path, name: str
) -> None:
    engine.reload(old).result()
    with torch.inference_mode():
        stale = parameters(engine)[name].clone()
        engine.reload(new).result()
        assert prove(engine, new) == []
        assert not torch.equal(parameters(engine)[name], stale)
        parameters(engine)[name].copy_(stale)
    told = f"{name} is" if "experts" not in name else "layers.1: all its tensors are"
    with pytest.raises(WrongContent, match=re.escape(told)):
        prove(engine, new)


def test_step_that_bfloat16_rounds_away_leaves_nothing_stale(old: Path, tmp_path: Path) -> None:
    engine = started(old, torch.bfloat16)
    tiny = stepped(old, tmp_path / "tiny", step=1e-12)
    assert prove(engine, tiny) == []
    with pytest.raises(WrongContent):
        prove(engine, stepped(old, tmp_path / "larger", step=1e-2))


@pytest.fixture
def adapters(old: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    first = make_adapter(tmp_path / "first", old, seed=1, targets="q_proj")
    yield first, stepped(first, tmp_path / "second")


@pytest.mark.parametrize("stale", ["merged", "own"])
def test_weight_of_a_layer_with_an_adapter_that_is_a_step_behind_is_found(
    engine: EmbeddedEngine, old: Path, new: Path, adapters: tuple[Path, Path], stale: str
) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    with torch.inference_mode():
        engine.reload(old).result()
        engine.load_adapter(adapters[0]).result()
        assert prove(engine, old, adapters[0]) == []
        merged = parameters(engine)[f"{layer}.weight"].clone()
        engine.load_adapter(adapters[1]).result()
        assert prove(engine, old, adapters[1]) == []
        with pytest.raises(WrongContent):
            prove(engine, old, adapters[0])
        if stale == "own":
            own = engine._adapter._own[layer]
            own.copy_(load_file(new / "model.safetensors")[f"{layer}.weight"])
        else:
            assert not torch.equal(parameters(engine)[f"{layer}.weight"], merged)
            parameters(engine)[f"{layer}.weight"].copy_(merged)
    with pytest.raises(WrongContent, match=rf"{layer}\.weight is"):
        prove(engine, old, adapters[1])


def test_server_says_what_is_wrong_and_with_what(
    server: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    admin = EngineAdmin(server.url)
    assert admin.can_prove() and admin.prove() == admin.prove(model_dir) == []
    other = stepped(model_dir, tmp_path / "other")
    with pytest.raises(
        WrongWeights, match=rf"was to serve {other}; it computes with other weights: layers\.0: "
    ):
        admin.prove(other)


def test_directory_that_cannot_be_read_is_no_proof_of_anything(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match="gone: is not a directory"):
        prove(engine, tmp_path / "gone")


def test_mount_that_fails_for_a_moment_is_read_again_and_one_that_stays_away_ends_no_engine(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(old, torch.float32)
    errors = [errno.ESTALE, errno.EIO]

    def read(path: Path) -> None:
        if errors:
            raise OSError(errors[0] if errors == forever else errors.pop(0), "not now")

    forever = [errno.ENODEV]
    monkeypatch.setattr(content, "check_model_dir", read)
    assert prove(engine, old) == [] and not errors
    errors[:] = forever
    with pytest.raises(WeightsError, match="cannot be read"):
        prove(engine, old)
    monkeypatch.setattr(EmbeddedEngine, "_reload", lambda *_: read(old))
    with pytest.raises(WeightsError, match=r"cannot be read.*not now"):
        engine.reload(old).result()
    with monkeypatch.context() as patched:  # what torch says of a file that it maps
        gone = tmp_path / "model.safetensors"
        patched.setattr(EmbeddedEngine, "_reload", lambda *_: torch.from_file(str(gone), size=4))
        with pytest.raises(WeightsError, match=r"cannot be read.*No such file"):
            engine.reload(old).result()
    assert engine.healthy
