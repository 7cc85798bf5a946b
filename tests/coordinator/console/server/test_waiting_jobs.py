"""Jobs that wait are started, whatever is wrong with another one."""

import json
from pathlib import Path

import psutil
import pytest

from coordinator.console.server import jobs
from coordinator.console.server.access import TokenCheck
from coordinator.console.server.app import Service, _listed
from coordinator.console.server.jobs import Job
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.readings import JobReader
from coordinator.console.server.runner import EXIT, PROCESS
from coordinator.console.server.starts import Conflict
from coordinator.console.server.submission import Submission
from coordinator.console.server.waiting_jobs import begin_next
from tests.coordinator.console.server.made_jobs import CLAIM, Script, until


def test_stopped_job_of_another_machine_holds_up_no_other(tmp_path: Path) -> None:
    away = jobs.submit(tmp_path, Submission("away", (), {}))
    (away.folder / "start_0001").mkdir()
    (away.start().folder / PROCESS).write_text(json.dumps({**CLAIM, "pid_space": "x", "host": "node-b"}))
    with pytest.raises(Conflict):
        away.stop(Launcher(), now=False)
    job = jobs.submit(tmp_path, Submission("sums", (), {}))
    begin_next(tmp_path, Script(), JobReader(), 1)
    assert job.start().has(PROCESS)
    job.stop(Script(), now=True)
    until(job.start().exit_code)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (PROCESS, ""),
        (PROCESS, "{}"),
        (PROCESS, json.dumps({**CLAIM, "pid": "1"})),
        (PROCESS, json.dumps({**CLAIM, "runner": {}})),
        (EXIT, "{}"),
        (EXIT, '{"code": "x"}'),
    ],
)
def test_job_with_a_damaged_file_is_listed_as_lost_and_holds_up_no_other(
    name: str, text: str, tmp_path: Path
) -> None:
    broken = jobs.submit(tmp_path, Submission("broken", (), {}))
    (folder := broken.start().folder).mkdir()
    (folder / PROCESS).write_text(json.dumps(CLAIM))
    (folder / name).write_text(text)
    job = jobs.submit(tmp_path, Submission("sums", (), {}))
    service = Service(tmp_path, TokenCheck("a-token-of-the-tests"), Script())
    begin_next(tmp_path, Script(), service.readings, 1)
    assert job.start().has(PROCESS)
    job.stop(Script(), now=True)
    until(job.start().exit_code)
    assert ("broken", "lost") in [(told["name"], told["state"]) for told in _listed(service)]
    broken.stop(Script(), now=True)
    broken.resume(1)
    assert broken.state(None, 0) == "submitted"


def test_job_whose_run_cannot_be_read_counts_only_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = jobs.submit(tmp_path, Submission("broken", (), {}))
    broken.begin(Script())
    until(lambda: broken.start().has(PROCESS))
    job = jobs.submit(tmp_path, Submission("sums", (), {}))
    service = Service(tmp_path, TokenCheck("a-token-of-the-tests"), Script())

    def damaged(_job: Job) -> None:
        raise KeyError("state")

    monkeypatch.setattr(service.readings, "tell", damaged)
    begin_next(tmp_path, Script(), service.readings, 1)
    assert not job.start().has(PROCESS)
    said = until(broken.start().process)
    for number in (said["runner"]["pid"], said["pid"]):
        psutil.Process(number).kill()
    until(lambda: broken.start().is_alive() is False)
    begin_next(tmp_path, Script(), service.readings, 1)
    assert job.start().has(PROCESS)
    job.stop(Script(), now=True)
    until(job.start().exit_code)
