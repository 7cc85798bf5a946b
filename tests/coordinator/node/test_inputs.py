"""What is refused before a node takes part: an engine that this machine cannot start."""

import pytest

from coordinator import config
from coordinator.node import inputs
from coordinator.settings import SettingsError
from rollout.engines import servers


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda _module: None)


@pytest.mark.usefixtures("no_vllm")
def test_vllm_that_is_not_installed_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match="--engine vllm: vLLM is not installed") as refused:
        inputs.load_inputs(config.build({"engine.kind": "vllm"}), {})
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    "given", [{"engine.url": "http://127.0.0.1:8000"}, {"rl_phase": "update"}, {"engine.kind": "torch"}]
)
def test_node_that_starts_no_vllm_needs_none(given: dict[str, str]) -> None:
    inputs.load_inputs(config.build({"engine.kind": "vllm", **given}), {})


def test_gpus_that_replicas_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(servers, "find_spec", lambda _module: object())
    settings = config.build({"engine.kind": "vllm", "engine.tensor_parallel_size": 2})
    with pytest.raises(SettingsError, match=r"tensor_parallel_size=2 does not divide the 3 GPUs"):
        inputs.load_inputs(settings, {})
