"""A guest whose engine does not get the policy of the run: what it makes, what it says, what ends it."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.node.iteration import Iteration
from coordinator.node.position import Position
from coordinator.phases.guest_loop import _load_next, _make
from coordinator.phases.load_policy import serve
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from rollout.engines.answers import EngineError
from rollout.storage.hashing import unheard
from tests.coordinator.examples import run_dir_at, write_checkpoint

WRONG = "the engine at unix:x holds other weights than the policy: model.embed_tokens.weight"


def guest_at(run_dir: RunDir, error: Exception, is_over: bool = False) -> Any:
    """A guest whose engine fails with `error`."""

    def ensure(*_: Any) -> None:
        raise error

    policy = SimpleNamespace(iteration=1, digest="p", directory=run_dir.checkpoint(1))
    return SimpleNamespace(
        run_dir=run_dir,
        settings=build({"model": "any"}),
        position=Position(),
        engine=SimpleNamespace(ensure=ensure),
        policies=SimpleNamespace(policy_of=lambda _: policy, hold=lambda policy, _moved: policy),
        reading=lambda: unheard,
        check=lambda: None,
        watch=SimpleNamespace(look=lambda: None),
        is_over=lambda *_: is_over,
    )


def serve_first(node: Any) -> None:
    serve(node, node.policies.policy_of(1))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path / "run")
    write_checkpoint(made.checkpoint(1))
    return made


def test_guest_that_cannot_prove_its_weights_makes_nothing_and_ends_with_the_reason(run_dir: RunDir) -> None:
    guest, made = guest_at(run_dir, EngineError(WRONG)), list[str]()

    def collect(node: Any, _iteration: Iteration) -> None:
        serve_first(node)
        made.append("a group")

    with pytest.raises(EngineError, match=WRONG):
        _make(guest, Iteration(2), Phase.TRAIN_ROLLOUT, collect)
    with pytest.raises(EngineError, match=WRONG):
        _load_next(guest, 1)
    assert made == []


def test_guest_whose_phase_is_over_before_its_engine_has_the_policy_says_so_and_goes_on(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    guest = guest_at(run_dir, EngineError(WRONG), is_over=True)
    with caplog.at_level(logging.INFO):
        _make(guest, Iteration(2), Phase.TRAIN_ROLLOUT, lambda node, _: serve_first(node))
    assert f"the phase is over ({WRONG})" in caplog.text


def test_guest_outlives_a_checkpoint_that_is_removed_while_its_engine_loads_it(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """On a filesystem of this machine the engine reads the checkpoint itself, which nobody keeps for it."""
    guest = guest_at(run_dir, EngineError("no such file: model.safetensors"))
    guest.policies.hold = lambda policy, _moved: shutil.rmtree(policy.directory) or policy
    with caplog.at_level(logging.INFO):
        _load_next(guest, 1)
    assert "no such file: model.safetensors; looking again when it is needed" in caplog.text
