"""What a worker says of the place at which it waits for a master."""

from pathlib import Path

from coordinator.directory.layout import RunDir
from coordinator.start.wait_for_master import what_is_there


def begin_run(root: Path) -> None:
    root.mkdir(parents=True)
    RunDir(root).run_json.write_text("{}")


def test_place_without_a_run_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    begin_run(tmp_path / "runs" / "exp1")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "a file").touch()
    runs = tmp_path / "runs"
    assert what_is_there(RunDir(runs / "exp1")) == ""
    assert what_is_there(RunDir(runs / "empty")) == " (no run has begun there)"
    assert what_is_there(RunDir(runs)) == " (no run has begun there; in it is the run exp1)"
    assert what_is_there(RunDir(runs / "exp")) == " (nothing is there; beside it is the run exp1)"
    assert what_is_there(RunDir(tmp_path / "rnus" / "exp1")) == (
        f" ({tmp_path / 'rnus'} is not there now: is it mounted here?)"
    )
