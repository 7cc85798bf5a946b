"""`Run.start`: a run that a program starts, waits for and stops."""

import sys
import textwrap
from pathlib import Path

import pytest

from coordinator import Run
from coordinator.console.views import run as run_module
from coordinator.directory.layout import FORMAT
from coordinator.settings.tree import SettingsError

STAND_IN = f"""
import json, pathlib, signal, sys, threading
root = pathlib.Path(sys.argv[2].partition("=")[2])
ended = threading.Event()
codes = []
for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 3)):
    signal.signal(number, lambda *_, code=code: (codes.append(code), ended.set()))
print("words", *sys.argv[3:], flush=True)
if "iterations=0" in sys.argv:
    sys.exit("run: no room")
for name in ("protocol", "checkpoints", "trajectories"):
    (root / name).mkdir(parents=True)
(root / "run.json").write_text(json.dumps({{"run_id": "abc", "format": {FORMAT}, "fixed": {{}}}}))
if "iterations=1" in sys.argv:
    sys.exit(0)
ended.wait()
sys.exit(codes[0])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of `run local`, which refuses nothing beforehand."""
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(run_module, "settings_of", lambda _words: "")
    monkeypatch.setattr(
        run_module, "run_command", lambda *words: [sys.executable, str(tmp_path / "stand_in.py"), *words]
    )


@pytest.mark.usefixtures("stand_in")
def test_started_run_is_waited_for_and_stopped(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "one", {"iterations": 1, "rollout.stop": ["\n"]})
    assert run.wait(60) == "finished"
    assert run.output() == 'words iterations=1 rollout.stop=["\\n"]\n'
    assert run.metrics() == []
    for is_now, end in ((False, "stopped"), (True, "lost")):
        run = Run.start(tmp_path / end)
        with pytest.raises(TimeoutError, match="goes on after 0 s"):
            run.wait(0)
        run.stop(is_now)
        assert run.wait(60) == end
        run.stop()  # it has ended: nothing happens


@pytest.mark.usefixtures("stand_in")
def test_run_that_makes_no_directory_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^run: no room$"):
        Run.start(tmp_path / "run", {"iterations": 0})


def test_settings_that_run_local_refuses_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"did you mean trainer\.learning_rate"):
        Run.start(tmp_path / "run", {"lr": 1e-6})
    assert not (tmp_path / "run").exists()
