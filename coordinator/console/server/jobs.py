"""A job on disk, and what its files say of it.

    ROOT/NAME/                     the run directory: `run status --log-path ROOT/NAME` works as ever
      job/
        job.json                   what was submitted; made once, and last: without it there is no job
        files/DIGEST/              the uploaded files, and the directory that the nodes work in
        start_0001/                the first start, and one more for each `resume`
          asked.json               somebody has resumed the job; job.json asks for the first start
          process.json             the process that was started, made once by itself
          output.log               what it prints
          stop.json, told.json     somebody has stopped it; the process has been told
          exit.json                its exit code
        guest_0001/                a guest that was asked for here, with the same files

Each file is made once, so whoever finds one can go on from there: a server that was killed leaves nothing
that its successor has to repair. Nothing else is known about a job.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.console.server.client import TOKEN_VARIABLE
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.runner import EXIT, OUTPUT, PROCESS, STOP, TOLD
from coordinator.console.server.starts import Conflict, JobStart
from coordinator.console.server.submission import JOB_NAME, Submission
from coordinator.directory import published
from coordinator.machine.run_command import run_command
from coordinator.protocol.exits import OUTCOMES
from rollout.storage import files, hashing, once

JOB, ASKED = "job.json", "asked.json"
FOLDER = "job"
GOING = {"gathering", "running", "holding"}
"""States of a job that has been started and has not ended."""
_START = re.compile(r"start_(\d{4,})", re.ASCII)


class UnknownJob(LookupError):
    """There is no job of this name, or not this part of it."""


class Job:
    """A job that was submitted. Every call reads the directory again."""

    def __init__(self, root: Path, name: str) -> None:
        """`root`: of all jobs. UnknownJob if it has none of this name."""
        self.log_path = root / name
        self.name = name
        self.folder = self.log_path / FOLDER
        document = published.read_json(self.folder / JOB) if JOB_NAME.fullmatch(name) else None
        if document is None or not document.keys() >= {"at", "digest", "options", "files"}:
            raise UnknownJob(
                f"no job {name if JOB_NAME.fullmatch(name) else 'of this name'}; run jobs lists all"
            )
        self.document = document

    @property
    def directory(self) -> Path:
        """Where the uploaded files are."""
        return self.folder / "files" / str(self.document["digest"])

    def start(self) -> JobStart:
        """Return the newest start, whether it has begun or not."""
        numbers = [1]
        for name in published.names(self.folder):
            match = _START.fullmatch(name)
            if match and ASKED in published.names(self.folder / name):
                numbers.append(int(match[1]))
        return JobStart(self.folder / f"start_{max(numbers):04d}")

    def begin(self, launcher: Launcher) -> None:
        """Have the newest start begin, unless it has or is stopped. For any number of servers at once."""
        start = self.start()
        if start.has(PROCESS) or start.has(STOP):
            return
        self._begin(start, launcher.command(self.log_path, self.document["options"], self.output()))

    def guests(self) -> list[JobStart]:
        """Return the guests that were asked for, the oldest first."""
        names = sorted(name for name in published.names(self.folder) if name.startswith("guest_"))
        return [JobStart(self.folder / name) for name in names]

    def add_guest(self, after: int) -> None:
        """Have this machine be a guest of the job, which has had `after` guests; asking twice is once. A
        guest ends when the run does.
        """
        guests = len(self.guests())
        if after not in {guests, guests - 1}:
            raise Conflict(f"{self.name} has had {guests} guests, not {after}")
        guest = JobStart(self.folder / f"guest_{after + 1:04d}")
        if not guest.has(PROCESS):
            self._begin(guest, run_command("guest", "--log-path", str(self.log_path)))

    def _begin(self, start: JobStart, command: Sequence[str]) -> None:
        files.make_directory(start.folder)
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "coordinator.console.server.runner",
                str(start.folder),
                str(self.directory),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,  # it outlives the server, whatever ends that
        )
        threading.Thread(target=process.wait, daemon=True).start()

    def resume(self, after: int) -> None:
        """Ask for another start after start number `after`, which must have ended; asking twice is once."""
        start = self.start()
        if start.number == after + 1:
            return
        if start.number != after:
            raise Conflict(f"{self.name} is at start {start.number}, not at {after}")
        # What says how it ended is written by a process that ends a moment later.
        if not start.has(EXIT) and (not (start.has(PROCESS) or start.has(STOP)) or start.is_alive()):
            raise Conflict(f"{self.name} has not ended: nothing to resume")
        following = self.folder / f"start_{after + 1:04d}"
        files.make_directory(following)
        once.create_once(following / ASKED, _document({}))

    def stop(self, launcher: Launcher, now: bool) -> None:
        """Stop the newest start as one Ctrl+C would: the master ends the run on all nodes. `now`: each node
        is ended, as by a second one. Without `now`, stopping twice is stopping once. Its guests leave.
        """
        start = self.start()
        if not start.has(EXIT):
            self._ask_to_stop(start)
        for guest in self.guests():
            if guest.has(EXIT) or guest.has(STOP):
                continue
            self._ask_to_stop(guest)
            with contextlib.suppress(Conflict):  # one on another machine ends with the run
                guest.signal(signal.SIGTERM)
        if start.has(EXIT):
            return
        self.tell_stop(launcher)
        if now:
            start.signal(signal.SIGTERM)

    def _ask_to_stop(self, start: JobStart) -> None:
        files.make_directory(start.folder)
        once.create_once(start.folder / STOP, _document({"token": secrets.token_hex(8)}))

    def tell_stop(self, launcher: Launcher) -> None:
        """Tell the process that the job is stopped, if it is, and unless that was done."""
        start = self.start()
        if not start.has(STOP) or not start.has(PROCESS) or start.has(TOLD) or start.has(EXIT):
            return
        if cancel := launcher.cancel(self.log_path):  # again at each look: it may not be in the queue yet
            subprocess.run(cancel, check=False, capture_output=True, timeout=60)
            return
        start.signal(signal.SIGINT)
        once.create_once(start.folder / TOLD, _document({}))

    def output(self) -> Path:
        """Return the file with what the newest start prints."""
        return self.start().folder / OUTPUT

    def state(self, run: str | None, iteration: int) -> str:
        """Return the state of the job; `run` and `iteration`: as the status of its run says, None: no run."""
        start = self.start()
        names = published.names(start.folder)
        code = start.exit_code() if EXIT in names else None
        alive = start.is_alive() if PROCESS in names and code is None else False
        return state_of(code, PROCESS in names, alive, STOP in names, run, iteration)


def state_of(
    code: int | None, began: bool, alive: bool | None, stopped: bool, run: str | None, iteration: int
) -> str:
    """Return the state of a job from its newest start and from its run: submitted, gathering, running,
    holding, finished, failed, stopped or lost.

    `alive`: None where it cannot be seen. `run`: the state of the run; a run that goes on is what it says,
    whether or not the process that started it is still there.
    """
    if code is not None:
        ended = OUTCOMES.get(code, "failed")
        return "stopped" if stopped and ended != "finished" else ended
    if not began:
        return "stopped" if stopped else "submitted"
    if alive is None and run is None and not stopped:  # on another machine, which has not come to the run
        return "gathering"
    if run in {"running", "holding"}:
        return "gathering" if run == "holding" and not iteration else run
    if alive:  # it has not come to the run yet, or it says what came of it
        return "running" if run == "finished" else "gathering"
    if run == "finished":
        return "finished"
    return "stopped" if stopped else "lost"


def environment() -> dict[str, str]:
    """Return the environment of what a server starts: without its token, with unbuffered output, and with
    this installation's `run`, which the job script of Slurm looks for.
    """
    variables = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    path = f"{Path(sys.executable).parent}:{variables.get('PATH', os.defpath)}"
    return {**variables, "PYTHONUNBUFFERED": "1", "PATH": path}


def submit(root: Path, submission: Submission) -> Job:
    """Make the job, or find that it is there; Conflict if another one has its name. It is there as soon as
    job.json is: everything before that may be done again.
    """
    folder = root / submission.name / FOLDER
    directory = folder / "files" / submission.digest
    if JOB not in published.names(folder):
        if (names := published.names(folder.parent)) and FOLDER not in names:
            raise Conflict(f"{folder.parent} is there, and is not a job; give another name")
        files.make_directory(directory)
        for name, data in submission.files.items():
            files.publish(directory / name, data)
        document = {
            "name": submission.name,
            "digest": submission.digest,
            "options": submission.options,
            "files": {name: hashing.facts_of(data) for name, data in submission.files.items()},
        }
        once.create_once(folder / JOB, _document(document))
    job = Job(root, submission.name)
    if job.document["digest"] != submission.digest:
        raise Conflict(f"there is a job {job.name} with other options or files; give another name")
    return job


def all_jobs(root: Path) -> list[Job]:
    """Return the jobs, in the order in which they were submitted."""
    jobs: list[Job] = []
    for name in published.names(root):
        with contextlib.suppress(UnknownJob, OSError):  # something else lies there
            jobs.append(Job(root, name))
    return sorted(jobs, key=lambda job: (job.document["at"], job.name))


def _document(content: Mapping[str, Any]) -> bytes:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({**content, "at": at}).encode()
