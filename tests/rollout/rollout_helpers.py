"""Embedded engines in processes of their own."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.imports import forked

START_TIMEOUT_S = 120


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str
    port: int

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def start_server(model_dir: Path, *arguments: str) -> RunningServer:
    command = [sys.executable, "-P", "-m", "rollout.engines.embedded.server", "--model", str(model_dir)]
    command += [] if "--uds" in arguments else ["--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(forked([*command, *arguments]), env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    if not line.startswith((f"serving {model_dir} on http://127.0.0.1:", f"serving {model_dir} on unix:/")):
        process.kill()
        process.wait()
        pytest.fail(f"the server did not start within {START_TIMEOUT_S} s: {line!r}")
    url = line.split()[-1]
    return RunningServer(process, url, int(url.rpartition(":")[2]) if url.startswith("http") else 0)


@contextlib.contextmanager
def serving(model_dir: Path, *arguments: str) -> Iterator[RunningServer]:
    server = start_server(model_dir, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not so within {timeout_s} s"
        time.sleep(0.01)


def write_lines(path: Path, *tasks: object) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path
