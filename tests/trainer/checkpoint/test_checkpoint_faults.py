"""Checkpoints written on a shared filesystem whose calls fail once in a while."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout.engines.model_dir import check_model_dir, policy_digest
from rollout.storage.files import SharedFsError
from rollout.storage.hashing import checksums
from tests.faultfs import FaultFs, unavailable
from trainer.batch.batch import Batch
from trainer.checkpoint import checkpoint, state
from trainer.checkpoint.probe import probe_tokens
from trainer.checkpoint.state import StateSaver
from trainer.documents import SavedState, TrainRequest, TrainResult
from trainer.model.learner import Learner

CPU = torch.device("cpu")
FAILING = {"error_rate": 0.03, "lie_rate": 0.03}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 1) as mounts:
        yield mounts


@pytest.fixture
def request_there(shared: FaultFs, batch: Batch, make_request: Callable[..., TrainRequest]) -> TrainRequest:
    """A request whose staging and state directories are on the filesystem."""
    for name in ("staging", "state"):
        (shared.backing / name).mkdir()
    paths = {f"{name}_dir": str(shared[0].path / name) for name in ("staging", "state")}
    return make_request(batch).model_copy(update=paths)


def load(request: TrainRequest) -> Learner:
    return checkpoint.load(Path(request.base_dir), request.base_policy, CPU, request.settings)


def write(learner: Learner, request: TrainRequest, batch: Batch, steps: int = 1) -> TrainResult:
    saver = StateSaver(timeout_s=60)
    staging_dir, probe = Path(request.staging_dir), probe_tokens(batch)
    result = checkpoint.write(learner, staging_dir, request, steps, {"loss": 0.0}, saver, probe=probe)
    saver.finish()
    return result


@pytest.mark.parametrize("steps", [1, 0], ids=["new weights", "copied"])
def test_checkpoint_is_whole_and_as_its_result_says(
    shared: FaultFs, request_there: TrainRequest, batch: Batch, steps: int
) -> None:
    learner = load(request_there)
    shared.set(**FAILING)
    result = write(learner, request_there, batch, steps)
    shared.set(error_rate=0, lie_rate=0)
    staging_dir = shared.backing / "staging"
    assert TrainResult.from_json((staging_dir / "result.json").read_bytes()) == result
    found = checksums(staging_dir)
    found |= {f"trainer_state/{name}": it for name, it in checksums(staging_dir / "trainer_state").items()}
    kept = {name: it for name, it in found.items() if not Path(name).name.startswith(".")}
    assert {**result.files, "result.json": found["result.json"]} == kept
    check_model_dir(staging_dir)
    assert policy_digest(checksums(staging_dir)) == result.policy
    resumed = checkpoint.load(staging_dir, result.policy, CPU, request_there.settings)
    for name, parameter in learner.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter)


def test_state_is_saved_whole_in_the_background(
    shared: FaultFs, request_there: TrainRequest, batch: Batch
) -> None:
    settings = request_there.settings.model_copy(update={"save_interval": 2})
    request = request_there.model_copy(update={"iteration": 2, "settings": settings})
    learner = load(request)
    shared.set(**FAILING)
    write(learner, request, batch)
    shared.set(error_rate=0, lie_rate=0)
    document = SavedState.from_json((shared.backing / "state" / state.DOCUMENT).read_bytes())
    found = checksums(shared.backing / "state")
    assert document.files and all(found[name] == facts for name, facts in document.files.items())


def test_full_filesystem_is_named_at_once_with_what_to_do(
    shared: FaultFs, request_there: TrainRequest, batch: Batch
) -> None:
    learner = load(request_there)
    (shared.backing / "staging" / checkpoint.STATE_DIR).mkdir()
    shared.set(full=True)
    with pytest.raises(SharedFsError, match=r"cannot write .*/staging/.*No space left .*; free some space"):
        write(learner, request_there, batch)
    assert [name for name in os.listdir(shared.backing / "staging") if name.endswith(".tmp")] == []
