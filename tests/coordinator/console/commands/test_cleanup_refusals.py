"""When `run cleanup` refuses, and removes nothing."""

import json
from pathlib import Path

import pytest

from coordinator.console.commands import cleanup as module
from coordinator.console.commands.cleanup import cleanup, with_new_beats
from coordinator.directory.file_names import Beat, Record
from coordinator.directory.layout import RunDir
from coordinator.keeping import resume
from coordinator.protocol import records
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import claim
from coordinator.protocol.snapshot import parse
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.tree import SettingsError
from rollout.storage import files
from tests.coordinator.console.commands.interrupted_run import (
    SETTINGS,
    N,
    beat,
    everything,
    interrupted_run,
    refused,
)
from tests.coordinator.examples import record, write_checkpoint


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    return interrupted_run(tmp_path / "run")


@pytest.mark.parametrize("by", ["metrics", "checkpoint"])
def test_finished_iteration_is_refused(run_dir: RunDir, by: str) -> None:
    if by == "metrics":
        run_dir.metrics.write_text(json.dumps({"iteration": N, "kind": "both"}) + "\n")
    else:
        write_checkpoint(run_dir.checkpoint(N), N)
    before = everything(run_dir.root)
    with pytest.raises(SettingsError, match=r"^iteration 2 is finished, nothing is removed$"):
        cleanup(run_dir.root, N)
    with pytest.raises(SettingsError, match=r"^iteration 1 is finished, nothing is removed$"):
        cleanup(run_dir.root, 1, keep_partial=True)
    assert everything(run_dir.root) == before


def test_iteration_that_a_node_finishes_as_its_last_deed_is_refused(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module.time,
        "sleep",
        lambda _s: run_dir.metrics.write_text(json.dumps({"iteration": N, "kind": "both"}) + "\n"),
    )
    with pytest.raises(SettingsError, match="iteration 2 is finished"):
        cleanup(run_dir.root, N)
    assert run_dir.manifest("train", N).exists() and not (run_dir.entry(Record(4))).exists()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("rollout", {"train_trajectories", "eval_trajectories"}),
        ("eval", {"eval_trajectories", "train_trajectories/iteration_000002/iteration.json"}),
    ],
)
def test_what_another_kind_of_run_has_finished_stays(run_dir: RunDir, kind: str, kept: set[str]) -> None:
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps({"iteration": N, "kind": kind}) + "\n")
    before = everything(run_dir.root)
    cleanup(run_dir.root, N)
    gone = before.keys() - everything(run_dir.root).keys()
    of_it = {path for path in before if "iteration_000002" in path}
    assert of_it - gone == {path for path in of_it if any(path.startswith(name) for name in kept)}


@pytest.mark.parametrize("epoch", [0, 4])
def test_node_that_beats_is_refused_by_name(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """A beat that moves, or the first one of a new process."""
    monkeypatch.setattr(module.time, "sleep", lambda _s: beat(run_dir, 1, 2, 0, epoch))
    assert refused(run_dir) == (
        "rank 1 (node-1) still beats: stop the run first: kill -INT 4712 on node-1, or Ctrl+C there"
    )
    assert run_dir.manifest("train", N).exists() and not (run_dir.entry(Record(4))).exists()


def test_where_the_master_beats_it_is_the_one_to_stop(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both_beat(_s: float) -> None:
        beat(run_dir, 0, 1, 6)
        beat(run_dir, 1, 1, 6)

    monkeypatch.setattr(module.time, "sleep", both_beat)
    text = refused(run_dir, dry_run=True)
    assert "rank 0 (node-0), rank 1 (node-1) still beat" in text and text.endswith(
        "first: kill -INT 4711 on node-0, or Ctrl+C there"
    )


def test_beat_that_stands_still_or_an_older_listing_is_no_movement() -> None:
    board, older = (parse([Beat(3, 0, 2, counter).name]) for counter in (5, 4))
    assert with_new_beats(board, board) == with_new_beats(board, older) == []
    assert with_new_beats(older, board) == [0]
    assert with_new_beats(board, parse([Beat(0, 0, 3, 0).name])) == [0]


@pytest.mark.parametrize("what", ["beat", "epoch"])
def test_node_that_comes_back_while_the_epoch_is_claimed_stops_it_before_anything_goes(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def claim_and_come_back(*arguments: object) -> bool:
        claimed = claim(*arguments)  # pyright: ignore[reportArgumentType]
        beat(run_dir, 0, 2, 0, 0) if what == "beat" else claim(run_dir, record(5, "lobby", {}))
        return claimed

    monkeypatch.setattr(records, "claim", claim_and_come_back)
    before = everything(run_dir.root)
    beginning = {"beat": "rank 0 (node-0) still beats", "epoch": "epoch 5 of"}[what]
    assert refused(run_dir).startswith(beginning)
    assert before.items() <= everything(run_dir.root).items()


def test_lost_claim_removes_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_second(*arguments: object) -> bool:
        claim(run_dir, record(4, "lobby", {}, master_incarnation=2, token="another"))
        return claim(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(records, "claim", claim_second)
    before = everything(run_dir.root)
    text = refused(run_dir)
    assert "epoch 4" in text and "a node has started" in text
    assert before.items() <= everything(run_dir.root).items()


def test_node_that_comes_back_in_the_middle_stops_it(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    remove = files.remove

    def remove_and_come_back(path: Path) -> None:
        remove(path)
        beat(run_dir, 1, 2, 0, 4)

    monkeypatch.setattr(files, "remove", remove_and_come_back)
    assert refused(run_dir).startswith("rank 1 (node-1) still beats")
    assert resume.resume_at(run_dir, SETTINGS, N) is Phase.CHECKPOINT


def test_iteration_that_was_never_opened_is_nothing_to_do(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(run_dir.root)
    cleanup(run_dir.root, 3, keep_partial=True)
    assert "iteration 3 has left nothing" in capsys.readouterr().out
    assert everything(run_dir.root) == before


def test_node_is_gone_after_the_time_after_which_the_others_take_it_for_lost() -> None:
    assert module.patience_s(ClusterSettings()) == 30.0
    assert module.patience_s(ClusterSettings(beat_s=20.0, node_timeout_s=50.0)) == 60.0
