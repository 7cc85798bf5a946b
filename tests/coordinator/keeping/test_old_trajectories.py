"""Which trajectories and batches stay, and that nothing goes that a later training may need."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.console.report.samples import reading
from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.keeping import trainer_states
from coordinator.keeping.old_trajectories import retire_iterations
from coordinator.machine.store import Store
from coordinator.node.iteration import Iteration
from coordinator.node.policies import Policies
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from rollout.storage import files
from tests.coordinator.examples import run_dir_at, write_checkpoint, write_json
from trainer.documents import SavedState


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return run_dir_at(tmp_path / "run")


def rolled_out(run_dir: RunDir, *iterations: int) -> None:
    for number in iterations:
        write_json(run_dir.iteration_json(number), {"iteration": number})
        write_json(run_dir.manifest("train", number), {"iteration": number, "parts": []})
        run_dir.trajectories("eval", number).mkdir()


def trained(run_dir: RunDir, *iterations: int, verified: bool = True, states: bool = True) -> None:
    """Iterations with trajectories, a batch and a checkpoint. `states`: each with the optimizer's state."""
    rolled_out(run_dir, *iterations)
    for number in iterations:
        write_json(run_dir.batch(number) / "batch.json", {"iteration": number})
        directory = run_dir.checkpoint(number)
        write_checkpoint(directory, number, b"weights %d" % number)
        if not states:
            shutil.rmtree(directory / "trainer_state")
            result = published.read_result(directory)
            facts = {name: fact for name, fact in result.files.items() if "trainer_state" not in name}
            (directory / "result.json").write_bytes(result.model_copy(update={"files": facts}).to_json())
        if verified:
            published.verify_and_record(directory)


def node_at(run_dir: RunDir, **settings: Any) -> Any:
    """A master, as far as this phase knows one."""
    identity: Any = SimpleNamespace(run_dir=run_dir, inputs=SimpleNamespace(model_files={}))
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return SimpleNamespace(run_dir=run_dir, settings=build(given), policies=Policies(identity, Store()))


def left(run_dir: RunDir, last: int, **settings: Any) -> list[int]:
    """The iterations that are there when iteration `last` has ended; all there is of them, or nothing."""
    for path in retire_iterations(node_at(run_dir, **settings), Iteration(last)):
        files.remove_tree(path)
    parents = [run_dir.trajectories(kind, 0).parent for kind in ("train", "eval")] + [run_dir.batch(0).parent]
    found = [{parse_iteration_name(name) for name in published.names(parent)} for parent in parents]
    assert found[0] == found[1] >= found[2] and None not in found[0]
    return sorted(number for number in found[0] if number is not None)


LAST_2 = {"trajectories__keep_last": 2, "checkpoints__keep_last": 2}


def test_all_stay_unless_it_is_asked_for(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(run_dir, 1, 2, 3, 4, 5)
    monkeypatch.setattr(files, "listing", lambda *_: pytest.fail("a directory with an entry an iteration"))
    assert retire_iterations(node_at(run_dir), Iteration(5)) == []


def test_newest_stay_and_every_nth(run_dir: RunDir) -> None:
    trained(run_dir, *range(1, 9))
    assert left(run_dir, 8, **LAST_2, trajectories__keep_every=3) == [3, 6, 7, 8]
    assert left(run_dir, 8, **LAST_2) == [7, 8], "another start, with other settings"
    assert left(run_dir, 8, trajectories__keep_last=1, checkpoints__keep_last=2) == [8]
    assert left(run_dir, 8, **LAST_2) == [8]


def test_what_was_not_trained_on_stays(run_dir: RunDir) -> None:
    trained(run_dir, 1, 2, 3, 4)
    rolled_out(run_dir, 5, 6, 7, 8, 9)
    assert left(run_dir, 9, **LAST_2, rl_phase="rollout") == list(range(1, 10))
    assert left(run_dir, 4, **LAST_2, rl_phase="update") == list(range(3, 10))


def test_batches_stay_that_a_training_from_an_older_checkpoint_repeats(run_dir: RunDir) -> None:
    """The optimizer's state is saved in every third iteration; three checkpoints are to fall back to."""
    trained(run_dir, *range(1, 10), states=False)
    for number in (1, 2, 3, 4, 5, 8):
        shutil.rmtree(run_dir.checkpoint(number))
    settings = {"trajectories__keep_last": 1, "checkpoints__keep_last": 3}
    assert left(run_dir, 9, **settings) == list(range(1, 10)), "there is no state yet"
    for number in (3, 6):
        state = SavedState(format=2, iteration=number, policy="p", optimizer_step=9, files={})
        run_dir.trainer_state(number, 2).mkdir()
        (run_dir.trainer_state(number, 2) / "state.json").write_bytes(state.to_json())
    assert trainer_states.newest_state(run_dir, 6) == 6 and trainer_states.newest_state(run_dir, 5) == 3
    assert left(run_dir, 9, **settings) == [7, 8, 9], "what was trained since the state of 6"
    published.set_aside(run_dir.checkpoint(7), "damaged")
    assert left(run_dir, 9, **settings) == [7, 8, 9], "there are only two checkpoints: all stays"


def test_all_stays_since_the_newest_checkpoint_that_is_known_to_be_whole(run_dir: RunDir) -> None:
    trained(run_dir, 1, 2, 3)
    trained(run_dir, 4, 5, 6, 7, verified=False)
    one = {"trajectories__keep_last": 1, "checkpoints__keep_last": 2}
    assert left(run_dir, 7, **one) == [4, 5, 6, 7]
    published.verify_and_record(run_dir.checkpoint(7))
    assert left(run_dir, 7, **one) == [7]


def test_replay_window_of_the_oldest_batch_that_may_be_made_anew_stays(run_dir: RunDir) -> None:
    trained(run_dir, *range(1, 9))
    assert left(run_dir, 8, **{**LAST_2, "trajectories__keep_last": 4}, trainer__replay_window=4) == [
        5,
        6,
        7,
        8,
    ]
    assert left(run_dir, 8, **{**LAST_2, "trajectories__keep_last": 3}, trainer__replay_window=3) == [6, 7, 8]


def test_early_iterations_stay_while_there_is_no_checkpoint_to_fall_back_to(run_dir: RunDir) -> None:
    trained(run_dir, 1)
    assert left(run_dir, 1, trajectories__keep_last=1, checkpoints__keep_last=2) == [1]
    trained(run_dir, 2)
    assert left(run_dir, 2, trajectories__keep_last=1, checkpoints__keep_last=2) == [2]


@pytest.mark.parametrize("calls", range(7))
def test_removal_that_was_cut_off_is_finished_later(
    run_dir: RunDir, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run_dir, *range(1, 6))
    rename, done = files.rename, 0

    def dies(*arguments: Any, **more: Any) -> None:
        nonlocal done
        if done == calls:
            raise KeyboardInterrupt
        done += 1
        rename(*arguments, **more)

    monkeypatch.setattr(files, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        retire_iterations(node_at(run_dir, **LAST_2), Iteration(5))
    monkeypatch.undo()
    for number in range(1, 6):
        directory = run_dir.trajectories("train", number)
        assert not directory.exists() or published.read_manifest(run_dir, "train", number), "whole or gone"
    assert left(run_dir, 5, **LAST_2) == [4, 5]
    assert not [path for path in run_dir.root.rglob(".removed*")]


def test_trajectories_that_were_moved_to_an_archive_stay_there(run_dir: RunDir, tmp_path: Path) -> None:
    trained(run_dir, *range(1, 6))
    archive = tmp_path / "archive"
    run_dir.trajectories("train", 2).rename(archive)
    run_dir.trajectories("train", 2).symlink_to(archive)
    assert left(run_dir, 5, **LAST_2) == [4, 5]
    assert sorted(path.name for path in archive.iterdir()) == ["iteration.json", "manifest.json"]


def test_readers_say_what_is_there_when_trajectories_are_gone(run_dir: RunDir) -> None:
    trained(run_dir, *range(1, 6))
    write_json(run_dir.run_json, {"run_id": "r", "format": FORMAT, "fixed": {}})
    lines = [{"iteration": number, "kind": "both", "reward": 0.5} for number in range(1, 6)]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert left(run_dir, 5, **LAST_2) == [4, 5]
    run = Run(run_dir.root)
    assert run.iterations() == [1, 2, 3, 4, 5] and run.status()["last_metrics"]["iteration"] == 5
    with pytest.raises(SettingsError, match=r"no train trajectories of iteration 2; .* of iterations 4 to 5"):
        run.trajectories(2)
    assert reading(run_dir, 2).groups == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trajectories.keep_every": 5}, "trajectories.keep_every=5 .* add trajectories.keep_last"),
        (
            {"trajectories.keep_last": 2, "trainer.replay_window": 3},
            "trajectories.keep_last=2 is less than trainer.replay_window=3.* give at least 3",
        ),
        ({"trajectories.keep_last": 0}, "trajectories.keep_last"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as error:
        build(given)
    assert "\n" not in str(error.value)
