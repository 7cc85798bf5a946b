"""Adapters in a running engine: loaded by a new name each, asked by that name, and by no other."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollout.engines.admin import WrongWeights, adapter_name
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import WeightsError
from rollout.origin import Sampling
from tests.adapters import make_adapter
from tests.engines.engines import KINDS, Engine, Reference, serving

RANK = 4
SAMPLING = Sampling(n=4, max_tokens=20, seed=1)
LONG_PROMPT = "12+34=46, " * 20
"""Longer than a block of vLLM's prefix cache on a CPU."""
TOLERANCE = 1e-4
FIRST, SECOND = adapter_name("first"), adapter_name("second")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def first(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "first", model_dir, seed=1, rank=RANK)


@pytest.fixture(scope="module")
def second(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "second", model_dir, seed=2, rank=RANK)


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with serving(request.param, model_dir, log, lora_rank=RANK) as engine:
        yield engine


def altered(source: Path, target: Path, lacks: str = "", **config: object) -> Path:
    """A copy of an adapter directory without tensors whose name ends in `lacks`, with another config."""
    shutil.copytree(source, target)
    file, about = target / "adapter_model.safetensors", target / "adapter_config.json"
    tensors = safetensors.numpy.load_file(file)
    kept = {name: np.array(tensors[name]) for name in tensors if not lacks or not name.endswith(lacks)}
    safetensors.numpy.save_file(kept, file, metadata={"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), **config}))
    return target


def test_adapter_answers_as_transformers_and_peft_do(
    engine: Engine, model_dir: Path, first: Path, reference: Reference
) -> None:
    engine.admin.reload(model_dir, "base")
    assert max(map(reference.error, engine.ask(LONG_PROMPT, SAMPLING))) < TOLERANCE
    engine.admin.load_adapter(first, "first")
    assert engine.admin.policy() == "first"
    adapted = Reference(first)
    for temperature in (1.0, 0.7):
        sampling = Sampling(n=8, max_tokens=40, temperature=temperature, seed=3)
        completions = engine.ask(LONG_PROMPT, sampling, model=FIRST)
        assert max(adapted.error(completion, temperature) for completion in completions) < TOLERANCE
        assert min(reference.error(completion, temperature) for completion in completions) > 0.1
    token_ids = adapted.tokenizer.encode("12+34=46")
    found = engine.admin.prompt_logprobs(token_ids, model=FIRST)
    assert found == pytest.approx(adapted.logprobs(token_ids), abs=TOLERANCE)


def test_next_adapter_takes_the_place_of_the_one_before_and_nothing_is_kept_of_that(
    engine: Engine, model_dir: Path, first: Path, second: Path
) -> None:
    engine.admin.reload(model_dir, "base")
    engine.admin.load_adapter(first, "first")
    before = engine.ask(LONG_PROMPT, SAMPLING, model=FIRST)
    assert engine.admin.prove(model_dir, first) == []
    engine.admin.load_adapter(second, "second", like=first)
    assert engine.admin.policy() == "second" and engine.admin.prove(model_dir, second) == []
    with pytest.raises(WrongWeights, match=r"was to serve .* and .*; it computes with other weights: layers"):
        engine.admin.prove(model_dir, first)
    after = engine.ask(LONG_PROMPT, SAMPLING, model=SECOND)
    assert max(map(Reference(second).error, after)) < TOLERANCE and after != before
    with pytest.raises(EngineError, match=f"404: .*{FIRST}"):
        engine.ask(LONG_PROMPT, SAMPLING, model=FIRST, retry_s=0.1)
    engine.admin.load_adapter(first, "first", like=second)
    assert engine.ask(LONG_PROMPT, SAMPLING, model=FIRST) == before


def test_another_adapter_under_the_name_and_path_of_the_one_before_leaves_nothing_of_that(
    engine: Engine, first: Path, second: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(first, tmp_path / "adapter")
    engine.admin.load_adapter(directory, "first")
    assert max(map(Reference(first).error, engine.ask(LONG_PROMPT, SAMPLING, model=FIRST))) < TOLERANCE
    shutil.copy(second / "adapter_model.safetensors", directory)
    engine.admin.load_adapter(directory, "first")
    assert max(map(Reference(second).error, engine.ask(LONG_PROMPT, SAMPLING, model=FIRST))) < TOLERANCE


def test_adapter_that_is_damaged_or_not_understood_is_refused_and_the_one_before_serves_on(
    engine: Engine, first: Path, tmp_path: Path
) -> None:
    engine.admin.load_adapter(first, "first")
    before = engine.ask(LONG_PROMPT, SAMPLING, model=FIRST)
    truncated = shutil.copytree(first, tmp_path / "truncated")
    file = truncated / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="its header describes"):
        engine.admin.load_adapter(truncated, "bad")
    missing = altered(first, tmp_path / "missing", lacks="0.self_attn.q_proj.lora_A.weight")
    with pytest.raises(WeightsError, match=r"lora_A\.weight' has shape none \(it is missing\)"):
        engine.admin.load_adapter(missing, "bad", like=first)
    with pytest.raises(EngineError, match=r"use_dora|DoRA"):
        engine.admin.load_adapter(altered(first, tmp_path / "dora", use_dora=True), "bad")
    assert engine.admin.policy() == "first"
    assert engine.ask(LONG_PROMPT, SAMPLING, model=FIRST) == before


def test_whole_models_and_adapters_are_not_taken_for_each_other(
    engine: Engine, model_dir: Path, first: Path
) -> None:
    with pytest.raises(WeightsError, match="is an adapter, not a whole model"):
        engine.admin.reload(first, "first")
    with pytest.raises(WeightsError, match="is a whole model, not an adapter"):
        engine.admin.load_adapter(model_dir, "base")


def test_model_is_served_alone_again_after_a_reload_and_takes_adapters_then(
    engine: Engine, model_dir: Path, other_model_dir: Path, first: Path, other_reference: Reference
) -> None:
    engine.admin.load_adapter(first, "first")
    before = engine.ask(LONG_PROMPT, SAMPLING, model=FIRST)
    engine.admin.reload(other_model_dir, "other")
    assert max(map(other_reference.error, engine.ask(LONG_PROMPT, SAMPLING))) < TOLERANCE
    engine.admin.reload(model_dir, "base")
    engine.admin.load_adapter(first, "first")
    assert engine.ask(LONG_PROMPT, SAMPLING, model=FIRST) == before


def test_sleeping_engine_is_woken_by_an_adapter_if_it_has_kept_its_weights(
    engine: Engine, model_dir: Path, first: Path, second: Path
) -> None:
    engine.admin.load_adapter(first, "first")
    engine.admin.sleep(1)
    engine.admin.load_adapter(second, "second")
    assert not engine.admin.is_sleeping()
    before = engine.ask(LONG_PROMPT, SAMPLING, model=SECOND)
    engine.admin.sleep(2)
    with pytest.raises(EngineError, match="has no weights to add an adapter to"):
        engine.admin.load_adapter(first, "first")
    engine.admin.reload(model_dir, "base")
    engine.admin.load_adapter(second, "second")
    assert engine.ask(LONG_PROMPT, SAMPLING, model=SECOND) == before


@pytest.mark.skipif("vllm" not in KINDS, reason="vLLM is not installed")
def test_server_that_takes_no_adapters_says_how_it_must_be_started(
    shared_engine: Engine, first: Path
) -> None:
    if shared_engine.kind != "vllm":
        pytest.skip("the embedded engine always takes them")
    before = shared_engine.admin.policy()
    with pytest.raises(
        EngineError, match=r"404: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and with --enable-lora"
    ):
        shared_engine.admin.load_adapter(first, "first")
    assert shared_engine.admin.policy() == before
    assert shared_engine.ask("1+2=", SAMPLING)
