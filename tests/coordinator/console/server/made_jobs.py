"""Jobs whose nodes are a program of the test."""

import sys
import time
from pathlib import Path
from typing import Any

from coordinator.console.server.launchers import Launcher
from coordinator.machine.network import pid_space

CLAIM = {
    "pid": 2**30,
    "created_s": 1.0,
    "runner": {"pid": 2**30, "created_s": 1.0},
    "pid_space": pid_space(),
    "host": "node-a",
}
"""What a process has said of itself that is not there any more."""


class Script(Launcher):
    """Starts a program of the test."""

    program = "import time; print('began', flush=True); time.sleep(60)"

    def command(self, log_path: Path, options: Any, output: Path) -> list[str]:
        return [sys.executable, "-c", self.program]


def until(ready: Any) -> Any:
    deadline_s = time.monotonic() + 60
    while not (value := ready()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return value
