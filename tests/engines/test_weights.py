"""New weights in a running engine, weights that are damaged, and an engine that dies."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollout.engines.admin import WrongWeights
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import WeightsError
from rollout.origin import Sampling
from tests.engines.engines import Engine, Reference, serving
from tests.models import CONTEXT

SAMPLING = Sampling(n=4, max_tokens=20, seed=1)
LONG_PROMPT = "12+34=46, " * 20
"""Longer than a block of vLLM's prefix cache on a CPU, 128 tokens: shorter ones are not kept."""
TOLERANCE = 1e-4
Tensors = dict[str, np.ndarray]


def altered(source: Path, target: Path, alter: Callable[[Tensors], object]) -> Path:
    """A copy of a model directory with other tensors."""
    shutil.copytree(source, target)
    tensors = safetensors.numpy.load_file(target / "model.safetensors")
    alter(tensors)
    safetensors.numpy.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_reload_serves_the_new_weights_and_nothing_that_was_kept_of_the_old(
    engine: Engine, model_dir: Path, other_model_dir: Path, other_reference: Reference
) -> None:
    before = engine.ask(LONG_PROMPT, SAMPLING)
    engine.admin.reload(other_model_dir, "other", like=model_dir)
    assert engine.admin.policy() == "other"
    after = engine.ask(LONG_PROMPT, SAMPLING)
    assert after != before
    assert max(other_reference.error(completion) for completion in after) < TOLERANCE
    assert engine.admin.prove(other_model_dir) == []
    with pytest.raises(WrongWeights, match=r"other weights: layers\.0: .*; layers\.1: .*; and 1 more$"):
        engine.admin.prove(model_dir)
    engine.admin.reload(model_dir, "back")
    assert engine.admin.policy() == "back"
    assert engine.ask(LONG_PROMPT, SAMPLING) == before


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_engine_is_woken_by_a_reload(
    engine: Engine, model_dir: Path, other_model_dir: Path, other_reference: Reference, level: int
) -> None:
    engine.admin.sleep(level)
    assert engine.admin.is_sleeping() and (engine.admin.policy() is None) == (level == 2)
    engine.admin.reload(other_model_dir, "other", like=model_dir)
    assert not engine.admin.is_sleeping() and engine.admin.policy() == "other"
    assert max(map(other_reference.error, engine.ask(LONG_PROMPT, SAMPLING))) < TOLERANCE


def test_damaged_checkpoint_is_refused_and_the_engine_serves_on(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    policy, before = engine.admin.policy(), engine.ask(LONG_PROMPT, SAMPLING)
    truncated = shutil.copytree(model_dir, tmp_path / "truncated")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="its header describes"):
        engine.admin.reload(truncated, "bad")
    missing = altered(model_dir, tmp_path / "missing", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' has shape none \(it is missing\)"):
        engine.admin.reload(missing, "bad", like=model_dir)
    assert engine.admin.policy() == policy
    assert engine.ask(LONG_PROMPT, SAMPLING) == before


def test_new_weights_are_loaded_although_those_served_before_were_damaged_since(
    engine: Engine, model_dir: Path, other_model_dir: Path, tmp_path: Path
) -> None:
    served = shutil.copytree(model_dir, tmp_path / "served")
    file = served / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    engine.admin.reload(other_model_dir, "other", like=served)
    assert engine.admin.policy() == "other"


def test_engine_whose_reload_failed_serves_nothing_until_one_succeeds(
    engine: Engine, model_dir: Path, other_model_dir: Path, tmp_path: Path
) -> None:
    before = engine.ask(LONG_PROMPT, SAMPLING)
    renamed = altered(
        other_model_dir, tmp_path / "renamed", lambda t: t.update(unknown=t.pop("model.norm.weight"))
    )
    with pytest.raises(EngineError, match="stays paused"):
        engine.admin.reload(renamed, "bad")
    assert engine.admin.policy() is None
    with pytest.raises(EngineError, match="no answer within"):
        engine.ask(LONG_PROMPT, SAMPLING, request_timeout_s=0.5)
    engine.admin.reload(model_dir, "good")
    assert engine.admin.policy() == "good"
    assert engine.ask(LONG_PROMPT, SAMPLING) == before


def test_another_server_draws_the_same_and_is_an_error_once_it_is_killed(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    with serving(engine.kind, model_dir, tmp_path / "log") as other:
        before, drawn = engine.ask(LONG_PROMPT, SAMPLING), other.ask(LONG_PROMPT, SAMPLING)
        assert [completion.token_ids for completion in drawn] == [c.token_ids for c in before]
        timer = threading.Timer(1.0, other.kill)
        timer.start()
        with pytest.raises(EngineError, match="Is the engine still running"):
            other.ask("1+2=", Sampling(n=4000, max_tokens=CONTEXT - 4), retry_s=0.5)
        timer.join()
        assert not other.admin.healthy()
        with pytest.raises(EngineError, match="exited before it answered"):
            other.admin.wait_healthy(10, alive=lambda: other.process.poll() is None)
