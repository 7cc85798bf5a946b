"""What a worker says of the place at which it waits for a master."""

import os
from pathlib import Path

import pytest

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from coordinator.protocol.exits import NodeEnded
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import read_placement
from coordinator.protocol.records import claim
from coordinator.start import wait_for_master
from coordinator.start.run_json import FORMAT
from coordinator.start.wait_for_master import NOTHING_YET, what_is_there
from tests.coordinator.examples import record, run_dir_at, write_json


def begin_run(root: Path) -> None:
    root.mkdir(parents=True)
    RunDir(root).run_json.write_text("{}")


def test_place_without_a_run_is_told_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(tmp_path / "runs" / "exp1")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "a file").touch()
    runs = tmp_path / "runs"
    assert what_is_there(RunDir(runs / "exp1")) == ""
    assert what_is_there(RunDir(runs / "empty")) == " (no run has begun there)"
    assert what_is_there(RunDir(runs)) == " (no run has begun there; in it is the run exp1)"
    assert (
        wait_for_master.what_is_there(RunDir(runs / "exp"))
        == " (nothing is there; beside it is the run exp1)"
    )
    assert what_is_there(RunDir(runs / "empty" / "new")) == NOTHING_YET
    assert what_is_there(RunDir(tmp_path / "rnus" / "exp1")) == (
        f" ({tmp_path / 'rnus'} is not there now: is it mounted here?)"
    )
    monkeypatch.chdir(tmp_path)  # below the current directory the master makes it
    assert what_is_there(RunDir(tmp_path / "rnus" / "exp1")) == NOTHING_YET


@pytest.mark.parametrize(("kind", "state"), [("stopped", "was stopped"), ("", "has no master that beats")])
def test_who_waits_at_a_run_that_is_not_going_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, state: str
) -> None:
    caplog.set_level("INFO")
    run_dir = run_dir_at(tmp_path / "exp")
    write_json(run_dir.run_json, {"format": FORMAT, "run_id": "made-up"})
    claim(run_dir, record())
    if kind:
        run_dir.entry(Flag(2, 5, Phase.TRAINING, 0, kind)).touch()
    monkeypatch.setattr(wait_for_master, "patience", lambda _timeout_s: iter([0.0, 31.0]))
    placement = read_placement(run_dir.root)
    for _ in range(2):
        with pytest.raises(NodeEnded):
            wait_for_master.await_master(run_dir, placement, 60.0, 30.0)
        command = f"(the run there {state}; to go on, on node-a: run --master --log-path {run_dir.root})"
        is_said = any(line.endswith(command) for line in caplog.messages)
        assert is_said is ("FLAGPOST_STARTED_BY" not in os.environ)
        monkeypatch.setenv("FLAGPOST_STARTED_BY", "run local")  # which starts the master itself
        caplog.clear()
