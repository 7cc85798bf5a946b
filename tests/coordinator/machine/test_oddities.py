"""What a machine lacks is said with its cure."""

import errno
import os
import threading
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.console.doctor.node_checks import judge_processes
from coordinator.machine import oddities
from coordinator.machine.oddities import TooFewProcesses, explained, startable


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))],
)
def test_error_of_few_processes_says_how_many_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "pids.max").write_text("24\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/pids.max").write_text("max\n")
    monkeypatch.setattr(oddities, "control_groups", lambda: [tmp_path / "inner", tmp_path, tmp_path / "gone"])
    why = explained(error)
    assert isinstance(why, TooFewProcesses)
    traceback = RuntimeError(f"Traceback:\n  t.start()\n{type(error).__name__}: {error}")
    assert str(explained(traceback)) == str(why), "of a child"
    assert str(error) in str(why) and "24 are allowed here (ulimit -u; docker --pids-limit" in str(why)
    assert "24 processes and threads are allowed: a node may need more (docker: --pids-limit)" in [
        *oddities.oddities()
    ]


def test_doctor_knows_of_a_loopback_that_is_down_and_that_temporary_files_have_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(oddities, "_loopback_flags", lambda: 0)
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    text = "; ".join(oddities.oddities())
    assert "loopback interface is down" in text and "no directory for temporary files" in text


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RuntimeError("can't start new thread"), 1, "run: can't start new thread: "),
        (FileNotFoundError(errno.ENOENT, "of getcwd"), 2, "run: the current directory was removed: go to"),
        (
            FileNotFoundError(errno.ENOENT, "of psutil", "/proc/stat"),
            1,
            "run: /proc/stat is not there: mount",
        ),
    ],
)
def test_command_that_cannot_start_says_why_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    text: str,
) -> None:
    def fail(_name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "_app", fail)
    assert cli.main() == code
    last = capsys.readouterr().err
    assert last.startswith(text) and last.count("\n") == 1


@pytest.mark.parametrize("allowed", [3, 10])
def test_doctor_says_that_a_node_may_start_too_few_processes(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    rows = judge_processes(startable(10), 10)
    assert [(row.verdict, row.figure) for row in rows] == [
        ("fail", "3 more can be started, threads included")
    ] * (allowed < 10)
    assert len(started) == allowed and not any(thread.is_alive() for thread in started)


def test_other_error_stays_as_it_is() -> None:
    error = RuntimeError("something else")
    assert explained(error) is error
