"""The actor on each machine of a Ray cluster: it starts the node, and passes words and lines.

The actor is sent to the machine by value, and its Python is that of Ray. So this file uses the standard
library alone, and flagpost need not be installed in that Python.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO

KEPT_LINES = 10_000
"""Lines that are kept while nobody fetches them: the newest."""
BATCH_LINES = 500
FLUSH_S = 1.0
"""How long the last output of a program that has ended may take."""
CUT_OFF = "cut off"
"""The word that closes the stdin of the program."""
MARK = ".flagpost-mark-"
"""How the name of a file begins with which machines find out whether they see the same directory."""


class Relay:
    """One machine. The program of `start` ends when this process does: its stdin is closed then."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._code: int | None = None
        self._changed = threading.Condition()

    def host(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def mark(self, directory: str) -> str:
        """Make a file in `directory`, or in the nearest directory above it that is there; return its path.
        OSError if this machine cannot write there.
        """
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        path = os.path.join(directory, f"{MARK}{secrets.token_hex(8)}")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return path

    def unmark(self, path: str) -> None:
        """Remove the file that `mark` made."""
        os.unlink(path)

    def sees(self, path: str, timeout_s: float) -> bool:
        """Return whether this machine lists a file. Another machine may list it a while after it was made."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError):  # there is no such directory here
                if os.path.basename(path) in os.listdir(os.path.dirname(path)):
                    return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)

    def start(self, argv: Sequence[str]) -> None:
        """Start a program in a session of its own; `exchange` has its stdin and its output."""
        environment = dict(os.environ)
        if b"OMP_NUM_THREADS=" not in _first_environment():  # Ray has set it in this process
            environment.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
        pump = threading.Thread(target=self._pump, args=(self._process.stdout,), daemon=True)
        pump.start()
        threading.Thread(target=self._wait, args=(self._process, pump), daemon=True).start()

    def exchange(self, words: Sequence[str], timeout_s: float) -> tuple[list[str], int | None]:
        """Write lines to the program's stdin (CUT_OFF: close it), then wait for output.

        Returns the next lines, and the exit code once the program has ended and all of its output was
        returned. A signal that ended it is a negative code.
        """
        assert self._process is not None and self._process.stdin is not None
        for word in words:
            if word == CUT_OFF:
                self._process.stdin.close()
                continue
            with contextlib.suppress(BrokenPipeError, ValueError):  # nobody reads it
                self._process.stdin.write(f"{word}\n".encode())
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._code is not None, timeout_s)
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), BATCH_LINES))]
            return lines, None if self._lines else self._code

    def _pump(self, output: IO[bytes]) -> None:
        with output:
            while raw := output.readline(64 * 1024):
                with self._changed:
                    self._lines.append(raw.decode("utf-8", "replace").rstrip("\r\n"))
                    self._changed.notify_all()

    def _wait(self, process: "subprocess.Popen[bytes]", pump: threading.Thread) -> None:
        code = process.wait()
        if process.stdin:
            process.stdin.close()
        pump.join(FLUSH_S)  # another process may keep the pipe open
        with self._changed:
            self._code = code
            self._changed.notify_all()


def _first_environment() -> bytes:
    """Return the environment that this process was started with, where the system shows it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return file.read()
    except OSError:
        return b"OMP_NUM_THREADS="
