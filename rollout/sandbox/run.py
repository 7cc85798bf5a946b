"""Run code that nobody has read, and return what came of it.

`rollout.sandbox.jail` says how, docs/sandbox.md what it protects against and what not.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Self

from rollout.sandbox.jail import NO_JAIL

OUTPUT_BYTES = 2**20
"""Bytes of stdout, and of stderr, that are kept: the beginning."""
_JAIL = str(Path(__file__).with_name("jail.py"))


class NoSandbox(RuntimeError):
    """This machine does not let the jail be made; the message says what is refused."""


@dataclass(frozen=True)
class Limits:
    """What a piece of code may use. What is beyond fails as the system makes it fail."""

    wall_s: float = 30.0
    """Seconds until everything is killed."""
    cpu_s: int = 10
    """Seconds of a processor, of each process."""
    memory_mib: int = 1024
    """Address space of each process."""
    processes: int = 16
    """Processes and threads at the same time."""
    disk_mib: int = 64
    """All files together; stdout and stderr each count for themselves."""


@dataclass(frozen=True)
class Outcome:
    """How code has ended."""

    stdout: str
    stderr: str
    """The first OUTPUT_BYTES of each; bytes that are no UTF-8 are replaced."""
    exit_code: int
    """128 + N if signal N has ended it; also what the code itself chose to exit with."""
    timed_out: bool
    """Whether `wall_s` has ended it."""


def run(code: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Run a Python program until it ends, and everything that it has started with it. Blocks for
    `limits.wall_s` at most. Raises NoSandbox.
    """
    with _file(stdin) as file, Jail({"main.py": code}, limits, stdin=file) as jail:
        return jail.outcome()


class Jail:
    """Code that runs. Leaving the context kills what is left of it."""

    def __init__(self, files: Mapping[str, str], limits: Limits, *, stdin: IO[bytes] | socket.socket) -> None:
        """Start `main.py` among `files`, which lie in its current directory."""
        self._open = ExitStack()
        job = {
            "files": dict(files),
            "wall_s": limits.wall_s,
            "disk_bytes": limits.disk_mib * 2**20,
            "limits": _limits(limits),
            "python": sys.executable,
            "readable": list(dict.fromkeys([sys.prefix, sys.base_prefix])),
        }
        self._output = [self._open.enter_context(_file()) for _ in range(2)]
        with _file(json.dumps(job)) as job_file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _JAIL, str(job_file.fileno())],
                stdin=stdin.fileno(),
                stdout=self._output[0],
                stderr=self._output[1],
                pass_fds=[job_file.fileno()],
                env={},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._open:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raise NoSandbox if it has turned out that the jail cannot be made."""
        if self._process.poll() == NO_JAIL:
            raise NoSandbox(_text(self._output[1]).strip())

    def outcome(self) -> Outcome:
        """Wait for the end, and return what came of it. Raises NoSandbox."""
        code = self._process.wait()
        self.check()
        stdout, stderr = (_text(output) for output in self._output)
        return Outcome(stdout, stderr, code if code >= 0 else 128 - code, code == -signal.SIGALRM)


@cache
def why_no_sandbox(limits: Limits) -> str | None:
    """Return why no program can run within these limits here; None if one can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    try:
        ended = run("print(end='ready')", limits=limits)
    except NoSandbox as error:
        return f"this machine refuses {error}"
    lines = ended.stderr.strip().splitlines()[-1:] or ["Python does not start within these limits"]
    return None if ended.stdout == "ready" else lines[0]


def _limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_mib * 2**20,
        "RLIMIT_FSIZE": limits.disk_mib * 2**20,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
    }


def _file(text: str = "") -> IO[bytes]:
    """Return a file without a name that holds the text."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.fchmod(file.fileno(), 0o666)  # the code is another user, and may open /dev/stdin
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode("utf-8", "replace")
