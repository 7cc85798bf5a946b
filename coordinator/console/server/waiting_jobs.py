"""Start the jobs that wait, and tell those that are stopped."""

import logging
import subprocess
import time
from pathlib import Path

from coordinator.console.server import jobs
from coordinator.console.server.jobs import Job
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.readings import JobReader
from coordinator.console.server.runner import EXIT, PROCESS, STOP
from coordinator.console.server.starts import Conflict

log = logging.getLogger(__name__)

BEGIN_S = 10.0
"""How long a process may take to say that it was started, until the next job is looked at."""


def begin_next(root: Path, launcher: Launcher, readings: JobReader, at_once: int) -> None:
    """Start as many of the jobs that wait as may run, in order; tell the stopped ones."""
    going, waiting = 0, list[Job]()
    for job in jobs.all_jobs(root):
        start = job.start()
        if start.has(EXIT):
            continue
        if start.has(PROCESS):
            going += _look_after(job, launcher, readings)
        elif not start.has(STOP):
            waiting.append(job)
    for job in waiting[: max(0, at_once - going)]:
        job.begin(launcher)
        until_s = time.monotonic() + BEGIN_S
        while not job.start().has(PROCESS) and time.monotonic() < until_s:
            time.sleep(0.02)
        readings.forget(job)


def _look_after(job: Job, launcher: Launcher, readings: JobReader) -> bool:
    """Tell a job that was started if it is stopped; return whether it goes on."""
    try:
        job.tell_stop(launcher)
    except (Conflict, OSError, subprocess.SubprocessError) as error:
        log.warning("%s", error)
    try:
        return readings.tell(job)["state"] in jobs.GOING
    except Exception:  # a job whose files are damaged holds up no other, unless it may be there
        log.exception("job %s", job.name)
        return job.start().is_alive() is not False
