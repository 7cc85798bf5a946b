"""A process of `run launch`, and what is left of it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from coordinator.directory.layout import RunDir

RUN = Path(sys.executable).with_name("run")


def text(path: Path) -> str:
    """What a file says; nothing if it is not there."""
    return path.read_text() if path.exists() else ""


def until(ready: Callable[[], Any], otherwise: Callable[[], str], timeout_s: float = 300.0) -> None:
    """Wait; AssertionError with `otherwise()` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.05)


class Launcher:
    """A process of `run launch`; its log path is a name that no other test's processes have."""

    def __init__(self, place: Path, name: str, *words: str, **how: Any) -> None:
        self.run_dir = RunDir(place / "run")
        self._out = place / name
        with open(self._out, "ab") as out:
            self.process = subprocess.Popen(
                [str(RUN), "launch", "--log-path", str(self.run_dir.root), *words],
                **{"cwd": place, "stdout": out, "stderr": out, "start_new_session": True, **how},
            )

    @property
    def said(self) -> str:
        return text(self._out)

    def until(self, ready: Callable[[], Any], timeout_s: float = 300.0) -> None:
        until(lambda: ready() or self.process.poll() is not None, lambda: self.said, timeout_s)
        assert ready(), self.said

    def wait(self, timeout_s: float = 300.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.said}") from None

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text(self.run_dir.metrics).splitlines()]

    def left(self) -> list[str]:
        """Processes that name the log path: launcher, ssh, shells on the hosts, nodes, their children."""
        found: list[str] = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or ())
            if str(self.run_dir.root) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {words}")
        return found

    def check_nothing_is_left(self, timeout_s: float = 60.0) -> None:
        until(lambda: not self.left(), lambda: f"left: {self.left()}\n{self.said}", timeout_s)
