"""trainer.freeze_vision: what no step changes is linked from checkpoint to checkpoint."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rollout.engines.content import saved_sums
from rollout.engines.embedded.weights import load_model
from rollout.engines.model_dir import FROZEN, policy_digest, tensor_names
from rollout.storage import delta
from rollout.storage.hashing import checksums
from trainer.batch.batch import Batch
from trainer.checkpoint import checkpoint
from trainer.checkpoint.checkpoint import CheckpointError
from trainer.checkpoint.state import StateSaver
from trainer.documents import TrainRequest, TrainResult
from trainer.model import tiny_seeing
from trainer.model.learner import Learner
from trainer.settings import TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
VISION = ("model.vision_tower.", "model.multi_modal_projector.")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "seeing"
    tiny_seeing.build(0, 0, out)
    return out


@pytest.fixture
def request_of(
    seeing: Path, batch: Batch, make_request: Callable[..., TrainRequest], tmp_path: Path
) -> Callable[..., TrainRequest]:
    """Makes the request of an iteration that goes on from a checkpoint; 0: from the model."""

    def request_of(number: int, **settings: Any) -> TrainRequest:
        base = tmp_path / f"{number - 1}" if number > 1 else seeing
        (staging := tmp_path / f"{number}").mkdir()
        asked = make_request(batch)
        return asked.model_copy(
            update={
                "iteration": number,
                "base_dir": str(base),
                "base_policy": policy_digest(checksums(base)),
                "model_dir": str(seeing),
                "staging_dir": str(staging),
                "settings": asked.settings.model_copy(update=settings),
                "delta": True,
            }
        )

    return request_of


def load(request: TrainRequest) -> Learner:
    return checkpoint.load(Path(request.base_dir), request.base_policy, CPU, request.settings)


def run(learner: Learner, batch: Batch, request: TrainRequest) -> TrainResult:
    steps = train(learner, batch, request.settings, max_tokens=32, report=lambda line: None)
    return checkpoint.write(learner, Path(request.staging_dir), request, len(steps), {}, StateSaver(60))


def weights(directory: str) -> dict[str, Tensor]:
    return dict(load_model(directory, torch.float32).named_parameters())


def test_the_file_of_the_tower_is_linked_and_all_else_is_trained_on_text_alone(
    batch: Batch, seeing: Path, request_of: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.hub_files.WORTH", 10.0)
    first = request_of(1)
    learner = load(first)
    run(learner, batch, first)
    second = request_of(2)
    run(learner, batch, second)  # the job goes on
    third = request_of(3)
    result = run(load(third), batch, third)  # another job
    directories = [Path(each.staging_dir) for each in (first, second, third)]
    assert len({(directory / FROZEN).stat().st_ino for directory in directories}) == 1
    assert (directories[1] / delta.delta_name("model-00001-of-00001.safetensors")).exists()
    assert not (directories[1] / delta.delta_name(FROZEN)).exists()
    base, now = weights(str(seeing)), weights(third.staging_dir)
    assert {name for name in now if torch.equal(base[name], now[name])} == {
        name for name in now if name.startswith(VISION)
    }
    assert load_file(directories[2] / FROZEN).keys() == {
        name for name in tensor_names(directories[2]) if name.startswith(("vision_tower.", "multi_modal"))
    }
    sums = saved_sums(directories[2], torch.float32)  # from the file that says them
    (directories[2] / "content.json").unlink()
    assert sums == saved_sums(directories[2], torch.float32)
    assert result.files[FROZEN] == checksums(directories[2])[FROZEN]
    state = directories[2] / "trainer_state"
    assert not any("vision" in name for path in state.glob("*.safetensors") for name in load_file(path))


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EXDEV])
def test_the_file_is_copied_where_it_cannot_be_linked(
    batch: Batch,
    request_of: Callable[..., TrainRequest],
    monkeypatch: pytest.MonkeyPatch,
    refusal: int,
) -> None:
    def link(*_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    first = request_of(1)
    learner = load(first)
    one = run(learner, batch, first)
    monkeypatch.setattr(os, "link", link)
    second = request_of(2)
    two = run(learner, batch, second)
    assert two.files[FROZEN] == one.files[FROZEN] == checksums(Path(second.staging_dir))[FROZEN]
    (Path(second.staging_dir) / FROZEN).write_bytes(b"another")
    third = request_of(3).model_copy(update={"base_policy": two.policy})
    with pytest.raises(OSError, match=r"2/model-frozen\.safetensors was read otherwise than before"):
        run(learner, batch, third)


def test_the_file_is_written_anew_in_another_number_type(
    batch: Batch, seeing: Path, request_of: Callable[..., TrainRequest]
) -> None:
    first = request_of(1, save_dtype="bfloat16")
    learner = load(first)
    (value,) = (v for name, v in learner.model.named_parameters() if name.endswith("patch_embedding.weight"))
    assert torch.equal(value, value.bfloat16().float())  # it computes with what is served
    run(learner, batch, first)
    second = request_of(2, save_dtype="float32")
    run(load(second), batch, second)
    types = [{kind for kind, _ in tensor_names(each.staging_dir).values()} for each in (first, second)]
    assert types == [{"BF16"}, {"F32"}]


def test_a_run_that_has_trained_the_tower_goes_on_without_or_with_it(
    batch: Batch, request_of: Callable[..., TrainRequest], caplog: pytest.LogCaptureFixture
) -> None:
    first = request_of(1, freeze_vision=False)
    run(load(first), batch, first)
    assert not (Path(first.staging_dir) / FROZEN).exists()
    with caplog.at_level(logging.WARNING):
        second = request_of(2)
        learner = load(second)
        assert learner.optimizer_step == 3 and "trainer.freeze_vision=false goes on" in caplog.text
    run(learner, batch, second)
    third = request_of(3, freeze_vision=False)
    with pytest.raises(CheckpointError, match=r"saved with trainer\.freeze_vision=true; set it back"):
        load(third)


def test_documents_of_before_say_that_all_was_trained(
    batch: Batch, request_of: Callable[..., TrainRequest]
) -> None:
    first = request_of(1)
    result = run(load(first), batch, first)
    assert TrainResult.from_json(result.to_json()).settings.freeze_vision
    old = result.model_dump(mode="json")
    del old["settings"]["freeze_vision"]
    assert not TrainResult.model_validate(old).settings.freeze_vision
    assert TrainerSettings().freeze_vision


def test_it_is_the_same_where_the_model_is_sharded(
    batch: Batch, seeing: Path, request_of: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        settings = {"layout": "sharded", "compute_dtype": "bfloat16"}
        first = request_of(1, **settings)
        run(load(first), batch, first)
        second = request_of(2, **settings)
        run(load(second), batch, second)
    finally:
        dist.destroy_process_group()
    assert (Path(first.staging_dir) / FROZEN).samefile(Path(second.staging_dir) / FROZEN)
    base, now = weights(str(seeing)), weights(second.staging_dir)
    assert {name for name in now if torch.equal(base[name].bfloat16().float(), now[name])} == {
        name for name in now if name.startswith(VISION)
    }
