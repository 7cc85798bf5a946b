"""`run serve` and its client with real runs: a server that is killed again and again, jobs from their
submission to their files on another machine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.console.server.client import Server, ServerError
from coordinator.directory.layout import RunDir
from coordinator.machine.network import LOOPBACK
from rollout.storage.hashing import file_facts
from tests.cluster.cluster import FAST, REPOSITORY, Cluster
from tests.ports import unused_port

TOKEN = "a-token-of-the-tests"
KILLS = 3
OPTIONS = [*(setting for setting in FAST if "reward" not in setting), "eval.interval=0"]


class Serving:
    """A server in a process of its own that can be killed and started again, at the same address."""

    def __init__(self, root: Path, cluster: Cluster, *options: str) -> None:
        self._port = str(unused_port())
        command = ("serve", "--root", str(root), "--port", self._port, *options)
        self._command = [sys.executable, "-m", "coordinator.cli", *command]
        self._environment = {**cluster.environment, "FLAGPOST_TOKEN": TOKEN, "PYTHONPATH": str(REPOSITORY)}
        self._cwd = root.parent
        self.server = Server(f"http://{LOOPBACK}:{self._port}", TOKEN)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, env=self._environment, cwd=self._cwd, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert "the token is in FLAGPOST_TOKEN" in self.said

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(120)


@pytest.fixture
def serving(tmp_path: Path, cluster: Cluster) -> Iterator[Serving]:
    """A server, and a cluster that finds what is left of the jobs."""
    served = Serving(tmp_path / "jobs", cluster)
    yield served
    if served.process.poll() is None:
        assert served.end(signal.SIGTERM) == 0


def test_server_killed_at_random_moments_starts_a_job_once_and_loses_nothing(
    serving: Serving, tmp_path: Path
) -> None:
    chance, names, failures = random.Random(20), ["first", "second"], list[str]()

    def submit(name: str) -> None:
        """As a client does whose answers are lost: it asks again."""
        time.sleep(chance.uniform(0, 4))
        for _ in range(3):
            try:
                serving.server.submit([*OPTIONS, "--iterations", "2"], name=name)
            except ServerError as error:  # the answer was cut off in the middle
                if error.status:
                    failures.append(str(error))

    threads = [threading.Thread(target=submit, args=(name,)) for name in names for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        time.sleep(chance.choice([0.0, 0.05, 0.2, 0.5, 1.0]))
        serving.end()
        serving.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for name in names:
        job = serving.server.job(name)
        assert job.wait(240) == "finished", "".join(job.logs(50))
        assert [line["iteration"] for line in job.metrics()] == [1, 2]
        folder = tmp_path / "jobs" / name / "job"
        assert sorted(os.listdir(folder)) == ["files", "job.json", "start_0001"]
        output = (folder / "start_0001" / "output.log").read_text()
        assert output.count("the run is finished after 2 iterations") == 1
        record = json.loads((folder / "start_0001" / "process.json").read_text())
        assert (folder / "start_0001" / "exit.json").exists() and record["pid"] > 1
    assert sorted(listed["name"] for listed in serving.server.jobs()) == names


def test_job_of_a_client_with_nothing_but_one_file(
    serving: Serving, tmp_path: Path, cluster: Cluster
) -> None:
    """Submit with a task file, watch, read the logs, stop, resume, fetch; in a directory of its own."""
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    (laptop / "client.py").write_bytes((REPOSITORY / "scripts" / "flagpost_client.py").read_bytes())
    sums = [f'{{"prompt": "{n}+2=", "answer": "{n + 2}"}}\n' for n in range(10, 30)]
    (laptop / "sums.jsonl").write_text("".join(sums))
    environment = {"FLAGPOST_TOKEN": TOKEN, "FLAGPOST_SERVER": serving.server.url, "PATH": os.environ["PATH"]}

    def client(*words: str, code: int = 0) -> str:
        python = [sys.executable, "-I", "client.py"]
        ended = subprocess.run(
            [*python, *words], cwd=laptop, env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    endless = ("--iterations", "1000")  # it is stopped, however long the commands take
    given = ("--tasks", "sums.jsonl", "--num-nodes", "2", *OPTIONS, *endless, "--name", "sums")
    assert "to send yours: --upload sums.jsonl" in client("submit", *given, code=2)
    assert client("submit", "--upload", "sums.jsonl", *given) == "sums\n"
    job = serving.server.job("sums")
    cluster.until(lambda: len(job.metrics()) >= 2, "two iterations")
    assert "running" in client("jobs") and "rank 0" in client("logs", "sums", "-n", "5")
    assert client("logs", "sums", "--rank", "1").startswith("==> logs/rank_0001/")
    assert "it ends after what it has begun" in client("stop", "sums")
    assert "job sums is stopped" in client("overwatch", "sums", code=130)
    assert "other options or files" in client("submit", "--name", "sums", "--iterations", "3", code=2)
    assert client("resume", "sums").strip() in {"submitted", "gathering"}
    before = job.metrics()[-1]["iteration"]
    cluster.until(lambda: job.metrics()[-1]["iteration"] > before, "another iteration")
    client("stop", "--now", "sums")
    assert job.wait(240) == "stopped" and job.status()["start"] == 2
    _fetch_and_compare(client, serving, laptop / "model", RunDir(tmp_path / "jobs" / "sums"))
    assert client("fetch", "sums", "-o", "page", "--report").strip() == "page/report.html"
    assert "sums" in (laptop / "page" / "report.html").read_text()


def _fetch_and_compare(client: Callable[..., str], serving: Serving, out: Path, run_dir: RunDir) -> None:
    """Fetch a model. An earlier attempt has left a part of one file, and a damaged part of another."""
    said = serving.server.ask("GET", "/jobs/sums/checkpoint")
    source = run_dir.checkpoint(said["iteration"])
    out.mkdir()
    (out / "model.safetensors.part").write_bytes((source / "model.safetensors").read_bytes()[:100_000])
    (out / "tokenizer.json.part").write_bytes(b"damaged")
    assert "100,000 of them earlier" in client("fetch", "sums", "-o", str(out))
    assert {path.name: file_facts(path) for path in out.iterdir()} == said["files"]
    assert client("fetch", "sums", "-o", str(out)).count(" is there") == len(said["files"])


def test_job_waits_for_its_turn_and_may_be_stopped_before(tmp_path: Path, cluster: Cluster) -> None:
    """The last one has code of its client, which this server takes."""
    serving = Serving(tmp_path / "jobs", cluster, "--allow-code")
    (tmp_path / "laptop").mkdir()
    mine, taken = (tmp_path / "laptop" / name for name in ("mine_of_the_tests.py", "json.py"))
    mine.write_text("def digits(task, completion):\n    return sum(c.isdigit() for c in completion) / 8\n")
    taken.write_text("")
    short = [*OPTIONS, "--iterations", "1", "--reward", f"{mine}:digits"]
    try:
        first = serving.server.submit([*OPTIONS, "--iterations", "1000"], name="first")
        cluster.until(lambda: first.status()["state"] == "running", "the first job")
        second = serving.server.submit([*OPTIONS, "--iterations", "1"], name="second")
        third = serving.server.submit(short, [mine], name="third")
        assert second.stop()["state"] == "stopped" and third.status()["state"] == "submitted"
        assert serving.end(signal.SIGINT) == 0  # Ctrl+C ends the server, but no job
        serving.start()
        assert first.status()["state"] == "running"
        first.stop()
        assert first.wait(240) == "stopped"
        assert third.wait(240) == "finished", "".join(third.logs(50))
        assert second.status()["state"] == "stopped"
        assert third.status()["files"] == [mine.name]
        assert "--reward=mine_of_the_tests:digits" in third.status()["options"]
        with pytest.raises(ServerError, match="no checkpoint of iteration 7; there are checkpoints of 1"):
            third.fetch("nowhere", 7)
        assert "nothing to do" in third.cleanup(2)
        with pytest.raises(ServerError, match="iteration 1 is finished, nothing is removed"):
            third.cleanup(1)
        with pytest.raises(ServerError, match=r"file json\.py: the server has a module of this name"):
            serving.server.submit(short, [taken], "taken")
    finally:
        serving.end(signal.SIGTERM)
