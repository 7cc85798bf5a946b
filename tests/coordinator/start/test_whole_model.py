"""A model whose files lack tensors is refused before the start: transformers fills them at random."""

import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from coordinator.settings import loading
from coordinator.settings.tree import SettingsError
from coordinator.start import whole_model
from coordinator.start.whole_model import refuse_incomplete
from tests.models import make_model

UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def altered(directory: Path, alter: Callable[[Tensors], Any]) -> Path:
    path = make_model(directory, seed=0) / "model.safetensors"
    tensors = load_file(path)
    alter(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def check(model: Path, **given: Any) -> None:
    refuse_incomplete(loading.build({"model": str(model), "engine.kind": "torch", **given}), model)


@pytest.mark.parametrize(
    ("phase", "alter", "reason"),
    [
        (
            "update",
            lambda t: t.pop(UP),
            f"has no values for 1 tensors of a Qwen3ForCausalLM, e.g. '{UP}'; give",
        ),
        (
            "both",
            lambda t: t.update({f"module.{UP}": t.pop(UP)}),
            "it does not know 1 that are there, e.g. 'module.",
        ),
        (
            "rollout",
            lambda t: t.update({UP: t[UP][1:]}),
            "has shape (127, 64) in its files, and (128, 64) in a Qwen3",
        ),
    ],
)
def test_model_with_tensors_that_would_be_random_is_refused(
    tmp_path: Path, phase: str, alter: Callable[[Tensors], Any], reason: str
) -> None:
    model = altered(tmp_path / "model", alter)
    with pytest.raises(SettingsError) as refused:
        check(model, rl_phase=phase)
    assert str(refused.value).startswith(f"--model {model}: ") and reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_refusal_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of this program may take the model."""
    model = altered(tmp_path / "model", lambda tensors: tensors.pop(UP))
    with pytest.raises(SettingsError):
        check(model)
    fixed = subprocess.CompletedProcess([], 0, stdout='{"unknown": []}\n')
    monkeypatch.setattr(whole_model.subprocess, "run", lambda *_, **__: fixed)
    check(model)


def test_tied_head_is_not_missing_and_what_is_known_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = altered(tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight", None))
    caplog.set_level(logging.WARNING)
    check(model)
    assert caplog.messages == []
    started: list[Any] = []
    monkeypatch.setattr(whole_model.subprocess, "run", lambda *given, **_: started.append(given))
    check(model)
    assert started == []


def test_tensors_that_the_model_has_not_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    check(altered(tmp_path / "model", lambda tensors: tensors.update(extra=tensors[UP].copy())))
    assert (
        "hold 1 tensors that transformers leaves out of the model" in caplog.text and "'extra'" in caplog.text
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "of tomorrow"},
            "transformers cannot read its config.json: .* model type `of tomorrow`",
        ),
        ({"model_type": "of tomorrow", "auto_map": {"AutoConfig": "its.Own"}}, "contains custom code"),
        ({"model_type": "t5"}, "transformers has no causal language model of type 't5'"),
    ],
)
def test_model_that_transformers_does_not_know_is_refused(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    model = make_model(tmp_path / "model", seed=0)
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=reason) as refused:
        check(model)
    assert "\n" not in str(refused.value)


def test_adapters_that_the_model_cannot_have_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = make_model(tmp_path / "model", seed=0)
    for targets, reason in (
        ("q_proj,typo", "the model has no module 'typo'; .* called down_proj, .*v_proj$"),
        ("all-linear,q_proj", "the model has no module 'all-linear'; all-linear alone means all"),
        ("norm", "Qwen3RMSNorm can have no adapter; name modules inside it, or others$"),
        ("self_attn", "Qwen3Attention can have no adapter; name modules inside it, or others$"),
        (",", "the model has no module ''"),
    ):
        with pytest.raises(SettingsError, match=reason) as refused:
            check(model, **{"trainer.lora.rank": 2, "trainer.lora.targets": targets})
        assert str(refused.value).startswith(f"trainer.lora.targets={targets}: ")
        assert "\n" not in str(refused.value)
    check(model, **{"trainer.lora.rank": 2, "trainer.lora.targets": "q_proj"})


def test_model_that_only_vllm_loads_is_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", never)
    check(altered(tmp_path / "model", lambda t: t.pop(UP)), rl_phase="rollout", **{"engine.kind": "vllm"})
