"""vLLM proves what its workers compute with: any one tensor that is a step behind is found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.admin import WrongWeights
from rollout.origin import Sampling
from tests.adapters import make_adapter
from tests.engines.engines import KINDS, Engine, Reference, serving
from tests.models import make_model, stepped

pytestmark = [
    pytest.mark.skipif("vllm" not in KINDS, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
RANK = 4
EXTENSION: dict[str, Any] = {"worker-extension-cls": "tests.engines.stale_worker.StaleWorker"}
TENSORS = {
    "fused": ("model.layers.0.self_attn.qkv_proj", "cpu_linear", "layers.0: all its tensors are"),
    "row": ("model.layers.1.self_attn.o_proj", "cpu_linear", "self_attn.o_proj.weight is"),
    "gate and up": ("model.layers.0.mlp.gate_up_proj", "cpu_linear", "layers.0: all its tensors"),
    "tied": ("model.embed_tokens", "weight", "outside of the layers: model.embed_tokens.weight is"),
    "packed for the output": ("lm_head", "cpu_linear", "outside of the layers: all its tensors are"),
    "norm": ("model.layers.1.input_layernorm", "weight", "model.layers.1.input_layernorm.weight is"),
    "router": ("model.layers.1.mlp.gate", "cpu_linear", "model.layers.1.mlp.gate.weight is"),
    "expert": ("model.layers.1.mlp.experts", "w13_weight", "layers.1: all its tensors are"),
}
ADAPTED = {
    "A": ("model.layers.0.self_attn.qkv_proj", "lora_a_stacked", "layers.0: all its tensors are"),
    "B": ("model.layers.1.self_attn.qkv_proj", "lora_b_stacked", "layers.1: all its tensors are"),
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "old", seed=0, hidden=128, experts=4)


@pytest.fixture(scope="module")
def new(old: Path) -> Path:
    return stepped(old, old.parent / "new")


@pytest.fixture(scope="module")
def engine(old: Path) -> Iterator[Engine]:
    with serving("vllm", old, old.parent / "log", **EXTENSION) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapted(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with serving("vllm", model_dir, log, lora_rank=RANK, **EXTENSION) as engine:
        yield engine


def call(engine: Engine, method: str, **arguments: str) -> set[str]:
    """What the workers answer."""
    answer = engine.admin._calls.post("/collective_rpc", {"method": method, "kwargs": arguments})
    return set(answer["results"])


@pytest.mark.parametrize(("layer", "tensor", "told"), TENSORS.values(), ids=TENSORS)
def test_tensor_that_is_a_step_behind_is_found(
    engine: Engine, old: Path, new: Path, layer: str, tensor: str, told: str
) -> None:
    engine.admin.reload(old, "old")
    call(engine, "keep", layer=layer, tensor=tensor)
    engine.admin.reload(new, "new")
    assert engine.admin.prove(new) == []
    assert call(engine, "put_back", layer=layer, tensor=tensor) == {"True"}, "the served values differ"
    with pytest.raises(WrongWeights) as raised:
        engine.admin.prove(new)
    assert told in str(raised.value)


@pytest.mark.parametrize(("layer", "tensor", "told"), ADAPTED.values(), ids=ADAPTED)
def test_tensor_of_an_adapter_that_is_a_step_behind_is_found(
    adapted: Engine, model_dir: Path, tmp_path: Path, layer: str, tensor: str, told: str
) -> None:
    first = make_adapter(tmp_path / "first", model_dir, seed=1, rank=RANK, targets="q_proj,k_proj,v_proj")
    second = stepped(first, tmp_path / "second")
    adapted.admin.load_adapter(first, "first")
    assert adapted.admin.prove(model_dir, first) == []
    call(adapted, "keep", layer=layer, tensor=tensor)
    adapted.admin.load_adapter(second, "second")
    assert adapted.admin.prove(model_dir, second) == []
    assert call(adapted, "put_back", layer=layer, tensor=tensor) == {"True"}
    with pytest.raises(WrongWeights) as raised:
        adapted.admin.prove(model_dir, second)
    assert told in str(raised.value)


def test_experts_are_packed_again_after_a_reload(engine: Engine, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=1, hidden=128, experts=4)
    engine.admin.reload(other, "other")
    answers = engine.ask("12+34=", Sampling(n=4, max_tokens=20, seed=1))
    assert max(map(Reference(other).error, answers)) < 1e-4


def test_ranks_prove_their_slices_and_each_replica_in_the_dtype_that_they_serve(
    old: Path, new: Path, tmp_path: Path
) -> None:
    norm = {"layer": "model.layers.1.input_layernorm", "tensor": "weight"}
    with serving("vllm", old, tmp_path / "log", ranks=2, dtype="bfloat16", **EXTENSION) as engine:
        assert engine.admin.prove() == []
        rounded_away = stepped(old, tmp_path / "tiny", step=1e-12)
        assert engine.admin.prove(rounded_away) == [], "nothing is stale: the served values are the same"
        call(engine, "keep", **norm)
        much = stepped(old, tmp_path / "much", step=1e-2)
        engine.admin.reload(much, "much")
        assert engine.admin.prove(much) == []
        assert call(engine, "put_back", **norm, rank="1") == {"True"}
        for _ in range(2):  # the ranks' answers stay in step
            with pytest.raises(WrongWeights, match=r"model\.layers\.1\.input_layernorm\.weight is"):
                engine.admin.prove(much)
        engine.admin.reload(new, "new")
        assert engine.admin.prove(new) == []
