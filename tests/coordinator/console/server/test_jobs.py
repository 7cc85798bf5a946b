"""A job by what lies in its directory: its state, its starts, its one claim."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.console.server import jobs
from coordinator.console.server.jobs import Job, UnknownJob, state_of
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.readings import JobReader
from coordinator.console.server.runner import EXIT, OUTPUT, PROCESS
from coordinator.console.server.starts import Conflict, JobStart
from coordinator.console.server.submission import Submission
from coordinator.machine.network import pid_space
from tests.coordinator.console.server.made_jobs import CLAIM, Script, until

STATES = [
    # exit code, begun, alive, stopped, state of the run, iteration: the state of the job
    ((None, False, False, False, None, 0), "submitted"),
    ((None, False, False, True, None, 0), "stopped"),
    ((None, True, True, False, None, 0), "gathering"),
    ((None, True, True, False, "holding", 0), "gathering"),
    ((None, True, True, False, "running", 1), "running"),
    ((None, True, True, False, "holding", 3), "holding"),
    ((None, True, True, True, "running", 3), "running"),
    ((None, True, True, False, "stopped", 3), "gathering"),
    ((None, True, True, False, "finished", 9), "running"),
    ((None, True, False, False, "running", 3), "running"),
    ((None, True, None, False, "holding", 3), "holding"),
    ((None, True, False, False, "finished", 9), "finished"),
    ((None, True, None, False, "finished", 9), "finished"),
    ((None, True, False, False, None, 0), "lost"),
    ((None, True, False, False, "stopped", 3), "lost"),
    ((None, True, False, True, "stopped", 3), "stopped"),
    ((0, True, False, False, "finished", 9), "finished"),
    ((0, True, False, True, "finished", 9), "finished"),
    ((1, True, False, False, "stopped", 3), "failed"),
    ((2, True, False, False, None, 0), "failed"),
    ((3, True, False, False, "stopped", 3), "lost"),
    ((4, True, False, False, "running", 3), "failed"),
    ((-9, True, False, False, "stopped", 3), "failed"),
    ((127, True, False, False, None, 0), "failed"),
    ((130, True, False, False, "stopped", 3), "stopped"),
    ((3, True, False, True, "stopped", 3), "stopped"),
]


@pytest.mark.parametrize(("seen", "expected"), STATES)
def test_state_follows_from_the_start_and_the_run(seen: tuple[Any, ...], expected: str) -> None:
    assert state_of(*seen) == expected


def test_what_else_lies_in_the_root_stops_no_job(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file")
    for name, text in (("old", "{}"), ("odd", "[1]"), ("half", "")):
        (tmp_path / name / "job").mkdir(parents=True)
        (tmp_path / name / "job" / "job.json").write_text(text)
    jobs.submit(tmp_path, Submission("sums", (), {}))
    assert [job.name for job in jobs.all_jobs(tmp_path)] == ["sums"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job that was submitted; what was started of it is killed at the end."""
    made = jobs.submit(tmp_path, Submission("sums", ("--iterations=3",), {"x.jsonl": b"{}"}))
    yield made
    for path in made.folder.glob("*_0*"):
        if JobStart(path).is_alive():
            JobStart(path).signal(signal.SIGKILL)


def test_submission_that_broke_off_is_no_job_until_it_is_sent_again(tmp_path: Path) -> None:
    asked = Submission("sums", ("--iterations=3",), {"x.jsonl": b"{}", "y.jsonl": b"[]"})
    directory = tmp_path / "sums" / "job" / "files" / asked.digest
    directory.mkdir(parents=True)
    (directory / "x.jsonl").write_bytes(b"{")
    assert jobs.all_jobs(tmp_path) == []
    job = jobs.submit(tmp_path, asked)
    assert {path.name: path.read_bytes() for path in job.directory.iterdir()} == asked.files
    assert [found.name for found in jobs.all_jobs(tmp_path)] == ["sums"]


def test_same_name_is_the_same_job_or_refused(tmp_path: Path, job: Job) -> None:
    again = jobs.submit(tmp_path, Submission("sums", ("--iterations=3",), {"x.jsonl": b"{}"}))
    assert again.document == job.document
    for other in (("--iterations=4",), {"x.jsonl": b"{}"}), (("--iterations=3",), {"x.jsonl": b"[]"}):
        with pytest.raises(Conflict, match="other options or files"):
            jobs.submit(tmp_path, Submission("sums", *other))
    assert Job(tmp_path, "sums").document == job.document


def test_directory_that_is_no_job_does_not_become_one(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").touch()
    with pytest.raises(Conflict, match="is not a job"):
        jobs.submit(tmp_path, Submission("mine", (), {}))
    with pytest.raises(UnknownJob):
        Job(tmp_path, "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["run.json"]


def test_job_that_many_begin_is_started_once(job: Job) -> None:
    for _ in range(8):
        job.begin(Script())
    until(lambda: job.start().has(PROCESS))
    until(lambda: job.output().exists() and job.output().read_text())
    time.sleep(0.5)
    assert job.output().read_text() == "began\n"
    assert job.state(None, 0) == "gathering"
    job.stop(Script(), now=False)
    assert until(job.start().exit_code) == -signal.SIGINT
    assert job.state(None, 0) == "stopped"


def test_start_that_is_stopped_before_it_begins_never_does(job: Job) -> None:
    job.stop(Launcher(), now=False)
    job.begin(Script())
    assert not job.start().has(PROCESS) and job.state(None, 0) == "stopped"
    # a runner that was on its way already
    runner = [
        sys.executable,
        "-m",
        "coordinator.console.server.runner",
        str(job.start().folder),
        str(job.directory),
    ]
    subprocess.run([*runner, "touch", str(job.folder / "started")], check=True, timeout=60)
    assert not (job.folder / "started").exists()
    assert (job.start().exit_code(), job.state(None, 0)) == (130, "stopped")


def test_stopping_twice_is_one_signal_and_now_is_another(job: Job) -> None:
    class Stubborn(Script):
        program = (
            "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('INT', flush=True)); "
            "print('began', flush=True); [time.sleep(0.1) for _ in range(600)]"
        )

    job.begin(Stubborn())
    until(lambda: job.output().exists() and job.output().read_text())
    for _ in range(3):
        job.stop(Stubborn(), now=False)
    until(lambda: "INT" in job.output().read_text())
    assert job.output().read_text() == "began\nINT\n" and job.start().exit_code() is None
    job.stop(Stubborn(), now=True)
    assert until(job.start().exit_code) == -signal.SIGTERM


def test_resuming_asks_for_one_start_after_the_one_that_has_ended(job: Job) -> None:
    with pytest.raises(Conflict, match="has not ended"):
        job.resume(1)
    job.begin(Script())
    until(lambda: job.start().has(PROCESS))
    with pytest.raises(Conflict, match="has not ended"):
        job.resume(1)
    job.stop(Script(), now=False)
    until(lambda: job.start().has(EXIT))
    for _ in range(2):
        job.resume(1)
    assert (job.start().number, job.state(None, 0)) == (2, "submitted")
    with pytest.raises(Conflict, match="is at start 2, not at 7"):
        job.resume(7)


def test_job_of_a_server_that_was_started_in_the_background_of_a_script_can_be_stopped(job: Job) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job.begin(Script())
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: job.start().has(PROCESS))
    job.stop(Script(), now=False)
    until(lambda: job.start().has(EXIT))


def test_guest_that_is_asked_for_twice_is_one_process_and_leaves_when_the_job_is_stopped(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(jobs, "run_command", lambda *words: waits)
    job.begin(Script())
    for after in (0, 0, 1):
        job.add_guest(after)
        until(lambda: job.guests()[-1].has(PROCESS))
    assert [guest.number for guest in job.guests()] == [1, 2]
    with pytest.raises(Conflict, match="sums has had 2 guests, not 5"):
        job.add_guest(5)
    until(lambda: job.start().has(PROCESS))
    job.stop(Script(), now=False)
    assert [until(guest.exit_code) for guest in job.guests()] == [-signal.SIGTERM] * 2
    until(job.start().exit_code)


def test_guest_is_told_of_in_the_job_with_its_last_words(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [sys.executable, "-c", "print('run: splits its rollouts'); raise SystemExit(2)"]
    monkeypatch.setattr(jobs, "run_command", lambda *words: fails)
    job.add_guest(0)
    until(lambda: job.guests()[0].has(EXIT))
    (told,) = JobReader().tell(job)["guests"]
    assert told == {"number": 1, "state": "failed", "error": "run: splits its rollouts"}


def test_command_that_is_not_there_says_so(job: Job) -> None:
    class Absent(Script):
        def command(self, log_path: Path, options: Any, output: Path) -> list[str]:
            return ["/no/such/program"]

    job.begin(Absent())
    assert until(job.start().exit_code) == 127
    assert (job.start().folder / OUTPUT).read_text().startswith("run: /no/such/program cannot be started")


def test_process_that_has_the_number_of_another_one_is_not_it(job: Job) -> None:
    folder = job.start().folder
    folder.mkdir()
    own = {"pid": psutil.Process().pid, "created_s": 1.0}
    said = {**own, "runner": own, "pid_space": pid_space(), "host": "here"}
    (folder / PROCESS).write_text(json.dumps(said))
    assert job.start().is_alive() is False and job.state(None, 0) == "lost"
    job.stop(Launcher(), now=True)  # this process goes on


def test_process_of_another_machine_is_not_judged(job: Job) -> None:
    folder = job.start().folder
    folder.mkdir()
    (folder / PROCESS).write_text(json.dumps({**CLAIM, "pid_space": "x", "host": "node-b"}))
    assert job.start().is_alive() is None and job.state("running", 3) == "running"
    assert job.state(None, 0) == "gathering"  # it may not have come to the run
    with pytest.raises(Conflict, match="it was started on node-b"):
        job.stop(Launcher(), now=False)
