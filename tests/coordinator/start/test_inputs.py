"""What is refused before a node takes part, and what the first start of a run chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coordinator.settings import loading
from coordinator.settings.tree import SettingsError
from coordinator.start import inputs, refusals, run_json, start
from coordinator.start.run_json import LARGE_STATE_BYTES
from rollout.engines import servers
from rollout.engines.admin import EngineAdmin
from tests.models import make_model


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "is_installed", lambda _module: False)


@pytest.mark.usefixtures("no_vllm")
def test_vllm_that_is_not_installed_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match="--engine vllm: vLLM is not installed") as refused:
        inputs.load_inputs(loading.build({"engine.kind": "vllm"}), {})
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    "given", [{"engine.url": "http://127.0.0.1:8000"}, {"rl_phase": "update"}, {"engine.kind": "torch"}]
)
def test_node_that_starts_no_vllm_needs_none(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineAdmin, "check", lambda _admin: None)
    inputs.load_inputs(loading.build({"engine.kind": "vllm", **given}), {})


def test_gpus_that_replicas_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(servers, "is_installed", lambda _module: True)
    settings = loading.build({"engine.kind": "vllm", "engine.tensor_parallel_size": 2})
    with pytest.raises(SettingsError, match=r"tensor_parallel_size=2 does not divide the 3 GPUs"):
        inputs.load_inputs(settings, {})


@pytest.mark.parametrize(
    ("gpus", "given", "words"),
    [
        ("", {"engine.dtype": "bfloat16"}, "engine.dtype=bfloat16 .* or give trainer.save_dtype=bfloat16"),
        ("", {"engine.kind": "vllm", "engine.args.dtype": "auto"}, "leave engine.args.dtype out"),
        (
            "0",
            {"engine.kind": "vllm", "engine.args.dtype": "float16"},
            "weights in bfloat16 and float16, and training",
        ),
        ("0", {"engine.kind": "torch", "trainer.save_dtype": "float32"}, "training with weights in bfloat16"),
    ],
)
def test_engine_and_trainer_that_would_round_weights_differently_are_refused(
    gpus: str, given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(servers, "is_installed", lambda _module: True)
    with pytest.raises(SettingsError, match=words) as refused:
        inputs.load_inputs(loading.build(given), {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "given"),
    [
        ("", {"engine.dtype": "float32"}),
        ("", {"engine.dtype": "bfloat16", "trainer.save_dtype": "bfloat16"}),
        ("", {"engine.kind": "vllm", "trainer.save_dtype": "bfloat16"}),
        ("", {"engine.dtype": "bfloat16", "rl_phase": "rollout"}),
        ("0", {"engine.kind": "vllm", "trainer.save_dtype": "float32"}),
        ("0", {"engine.kind": "vllm", "engine.args.dtype": "float32"}),
        ("0", {"engine.kind": "torch"}),
    ],
)
def test_engine_that_rounds_as_training_does_is_taken(
    gpus: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(servers, "is_installed", lambda _module: True)
    inputs.load_inputs(loading.build(given), {})


def test_large_model_on_gpus_without_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(servers, "is_installed", lambda _module: False)
    given = {"model": str(make_model(tmp_path / "model", seed=0))}
    inputs.load_inputs(loading.build(given), {})
    monkeypatch.setattr(refusals, "SLOW_PARAMETERS", 1000)
    with pytest.raises(
        SettingsError, match=r"2 GPUs but no vLLM, .* pip install -e '.\[vllm\]', or give --eng"
    ):
        inputs.load_inputs(loading.build(given), {})
    inputs.load_inputs(loading.build({**given, "engine.kind": "torch"}), {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    inputs.load_inputs(loading.build(given), {})


# ---- how often the optimizer's state is saved

LARGE, SMALL = LARGE_STATE_BYTES + 1, LARGE_STATE_BYTES


def test_first_start_records_how_often_the_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", seed=0)
    given = {"model": str(model), "engine.kind": "torch"}
    parameters = inputs.load_inputs(loading.build(given), given).state_bytes / inputs.STATE_BYTES
    assert parameters == sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    monkeypatch.setattr(run_json, "LARGE_STATE_BYTES", parameters)
    first = start.start_master(tmp_path / "run", given)
    assert first.settings.trainer.save_interval == 10
    assert json.loads(first.run_dir.run_json.read_text())["save_interval"] == 10
    monkeypatch.setattr(run_json, "LARGE_STATE_BYTES", 1e12)  # another version of the program
    assert start.start_master(tmp_path / "run", given).settings.trainer.save_interval == 10
    assert start.start_master(tmp_path / "other", given).settings.trainer.save_interval == 1
    lora = {**given, "trainer.lora.rank": 2}
    assert inputs.load_inputs(loading.build(lora), lora).state_bytes == 0


@pytest.mark.parametrize(
    ("given", "run", "size", "interval"),
    [
        ({}, {"save_interval": 10}, LARGE, 10),
        ({}, {"save_interval": 1}, SMALL, 1),
        ({"trainer.save_interval": 3}, {"save_interval": 10}, LARGE, 3),
        ({"trainer.save_interval": 1}, {"save_interval": 10}, LARGE, 1),
        ({"trainer.keep_alive": False}, {"save_interval": 10}, LARGE, 1),
        ({}, {}, LARGE, 1),
    ],
)
def test_what_the_user_gives_goes_before_what_the_run_has_chosen(
    given: dict[str, Any], run: dict[str, int], size: int, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = start.with_save_interval(loading.build(given), run, size)
    assert settings.trainer.save_interval == settings.trainer.state_interval == interval
    said = f"the optimizer's state has 20 GB: trainer.save_interval={interval} saves it in"
    assert (said in caplog.text) == (size == LARGE)
