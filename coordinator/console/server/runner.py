"""Start a job's command once, whoever asks for it and however often, and note how it has ended.

    python -m coordinator.console.server.runner FOLDER DIRECTORY COMMAND...

The process that becomes the command claims the start itself, by creating FOLDER/process.json: a claim that
is there names a process that was started, so nobody can die between the two. It claims first and looks for
stop.json afterwards; who stops a job does it the other way round, so that one of them sees the other.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from coordinator.machine.network import pid_space
from rollout.storage import files, once

PROCESS, EXIT, STOP, TOLD, OUTPUT = "process.json", "exit.json", "stop.json", "told.json", "output.log"
INTERRUPTED = 130
NOT_STARTED = 127
"""The exit code of a command that cannot be started."""


def main(folder: Path, directory: str, command: Sequence[str]) -> None:
    """Claim the start and run the command in `directory`; return when it has ended, or if it was claimed
    before.
    """
    if PROCESS in files.listing(folder):
        return
    runner = _about(psutil.Process())
    pid = os.fork()
    if not pid:
        _become(folder, directory, command, runner)
    _, status = os.waitpid(pid, 0)
    claimed = json.loads(files.read(folder / PROCESS))
    if claimed["pid"] == pid and claimed["pid_space"] == pid_space():
        code = {"code": os.waitstatus_to_exitcode(status)}
        once.create_once(folder / EXIT, json.dumps(code).encode())


def _about(process: psutil.Process) -> dict[str, Any]:
    return {"pid": process.pid, "created_s": process.create_time()}


def _become(folder: Path, directory: str, command: Sequence[str], runner: dict[str, Any]) -> None:
    """Claim the start, and become the command. `runner`: who will say how it has ended."""
    # A server that a script has started with & ignores it, and so would the command, which it is to stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    claim = {
        **_about(psutil.Process()),
        "runner": runner,
        "pid_space": pid_space(),
        "host": socket.gethostname(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
    }
    claimed = once.create_once(folder / PROCESS, json.dumps(claim).encode())
    if not claimed or STOP in files.listing(folder):
        os._exit(INTERRUPTED)
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, files.MODE)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        os.chdir(directory)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"run: {command[0]} cannot be started in {directory}: {error.strerror}\n".encode())
    os._exit(NOT_STARTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
