"""Where a training job that starts anew finds its optimizer's state, and which states are kept."""

import json
from pathlib import Path

import pytest

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.keeping import trainer_states
from tests.coordinator.examples import run_dir_at, write_checkpoint, write_json
from trainer.documents import SavedState
from trainer.settings import TrainerSettings


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with checkpoints 1 to 5, none with a trainer state inside, and its batches."""
    run_dir = run_dir_at(tmp_path)
    for iteration in range(1, 6):
        write_checkpoint(run_dir.checkpoint(iteration), iteration, content=b"weights %d" % iteration)
        (run_dir.checkpoint(iteration) / "trainer_state" / "optimizer.safetensors").unlink()
        (run_dir.checkpoint(iteration) / "trainer_state").rmdir()
        write_json(run_dir.batch(iteration) / "batch.json", {"sha256": f"{iteration:064}"})
        (run_dir.batch(iteration) / "batch.safetensors").write_bytes(b"batch")
        how = {"settings": TrainerSettings(save_interval=2), "max_tokens": 8}
        result = published.read_result(run_dir.checkpoint(iteration))
        trained = result.model_copy(update={**how, "batch_sha256": f"{iteration:064}"})
        run_dir.trained(iteration).write_bytes(trainer_states.trained(run_dir, trained).to_json())
    lines = [{"iteration": iteration, "kind": "both"} for iteration in range(1, 6)]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run_dir


def save_state(run_dir: RunDir, iteration: int, epoch: int = 2, policy: str = "", whole: bool = True) -> str:
    """A state in the background, of the published policy by default; its name."""
    policy = policy or published.policy_of(run_dir, iteration).digest
    document = SavedState(format=2, iteration=iteration, policy=policy, optimizer_step=9, files={})
    directory = run_dir.trainer_state(iteration, epoch)
    directory.mkdir()
    (directory / ("state.json" if whole else "state-00001-of-00001.safetensors")).write_bytes(
        document.to_json()
    )
    return directory.name


def base(run_dir: RunDir, iteration: int) -> published.Policy:
    return published.policy_of(run_dir, iteration)


def test_state_of_the_base_itself_is_continued_and_nothing_repeated(run_dir: RunDir) -> None:
    save_state(run_dir, 2)
    name = save_state(run_dir, 4)
    found = trainer_states.resume_from(run_dir, base(run_dir, 4))
    assert (found.state_dir, found.repeat) == (f"trainer_states/{name}", ())
    assert found.state_policy == published.policy_of(run_dir, 4).digest


def test_iterations_since_the_newest_state_are_repeated_from_their_batches(run_dir: RunDir) -> None:
    name = save_state(run_dir, 2)
    save_state(run_dir, 4, whole=False)  # its job was killed before it was written
    save_state(run_dir, 3, policy="f" * 16)  # of a training whose checkpoint was set aside
    found = trainer_states.resume_from(run_dir, base(run_dir, 4))
    assert found.state_dir == f"trainer_states/{name}"
    assert [batch.iteration for batch in found.repeat] == [3, 4]
    assert found.repeat[0].batch_sha256 == f"{3:064}"
    here = trainer_states.with_local_paths(run_dir, base(run_dir, 4), found)
    assert here.state_dir == str(run_dir.trainer_states / name)
    assert [Path(batch.batch_file) for batch in here.repeat] == [
        run_dir.batch(n) / "batch.safetensors" for n in (3, 4)
    ]


@pytest.mark.parametrize("gone", ["batch.json", "batch.safetensors", "trained.json"])
def test_without_a_batch_the_optimizer_starts_afresh(
    run_dir: RunDir, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_state(run_dir, 2)
    (run_dir.batch(3) / gone).unlink()
    assert trainer_states.resume_from(run_dir, base(run_dir, 4)).state_dir is None
    assert "its optimizer starts afresh" in caplog.text


def test_batch_that_was_made_anew_since_cannot_be_repeated(run_dir: RunDir) -> None:
    save_state(run_dir, 2)
    write_json(run_dir.batch(3) / "batch.json", {"sha256": "other"})
    assert trainer_states.resume_from(run_dir, base(run_dir, 4)).state_dir is None


def test_state_in_an_older_checkpoint_is_gone_on_from_too(run_dir: RunDir) -> None:
    inside = run_dir.checkpoint(2) / "trainer_state"
    policy = published.policy_of(run_dir, 2).digest
    document = SavedState(format=2, iteration=2, policy=policy, optimizer_step=9, files={})
    inside.mkdir()
    (inside / "state.json").write_bytes(document.to_json())
    found = trainer_states.resume_from(run_dir, base(run_dir, 4))
    assert found.state_dir == "checkpoints/iteration_000002/trainer_state"
    assert [batch.iteration for batch in found.repeat] == [3, 4]


def test_damaged_checkpoint_of_another_iteration_is_of_no_account(run_dir: RunDir) -> None:
    name = save_state(run_dir, 3)
    (run_dir.checkpoint(1) / "result.json").unlink()
    assert trainer_states.resume_from(run_dir, base(run_dir, 4)).state_dir == f"trainer_states/{name}"


def test_base_with_a_state_of_its_own_needs_no_other(run_dir: RunDir) -> None:
    save_state(run_dir, 3)
    write_json(run_dir.checkpoint(4) / "trainer_state" / "state.json", {})
    assert trainer_states.resume_from(run_dir, base(run_dir, 4)).state_dir is None


def test_damaged_document_is_no_state(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    name = save_state(run_dir, 2)
    write_json(run_dir.trainer_state(4, 2) / "state.json", {"format": 2})
    assert trainer_states.resume_from(run_dir, base(run_dir, 4)).state_dir == f"trainer_states/{name}"
    assert "is not used" in caplog.text


def test_two_newest_states_are_kept_and_the_one_being_written(run_dir: RunDir) -> None:
    for iteration in (1, 2, 4):
        save_state(run_dir, iteration)
    save_state(run_dir, 4, epoch=3)  # of a second attempt
    save_state(run_dir, 3, whole=False)  # never finished, and no longer needed
    save_state(run_dir, 5, whole=False)
    nameless = trainer_states.retire_states(run_dir)
    there = {run_dir.trainer_states / name for name in published.names(run_dir.trainer_states)}
    assert sorted(path.name for path in there - {*nameless}) == [
        run_dir.trainer_state(iteration, epoch).name for iteration, epoch in [(2, 2), (4, 2), (4, 3), (5, 2)]
    ]


def test_first_state_is_kept_while_it_is_being_written(run_dir: RunDir) -> None:
    save_state(run_dir, 2, whole=False)
    assert not trainer_states.retire_states(run_dir)
    assert len(published.names(run_dir.trainer_states)) == 1
