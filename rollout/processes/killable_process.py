"""A process of the pool, which makes one call at a time and can be killed with all that it has started.

    node ---- socket, one line of JSON each way ---- pool_main
      \\------ pipe ---- guard: at end of file it kills the process group, itself included

*No orphan.* Each process forms a group with a guard of its own, so that ^C does not reach them, and what the
process has started ends with it. Only the node holds the write end of the guard's pipe. When the node ends in
any way, the guard kills the group, also processes that are busy in C code. A process that joins the group too
late finds its socket at end of file and exits. So a pool need not be closed. What has left the group by a
session of its own is ended where the node ends the process, and survives only if the node is killed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from json import loads  # code of the user's may set others in the module
from pathlib import Path
from typing import IO, Any

import psutil

GONE_S = 5.0
"""How long a killed process may take to vanish."""
LINE_BYTES = 4096
"""Longer lines of output are split."""
LINES_A_SECOND = 50
"""A process that prints more than this loses the rest of its output."""
_MAIN = str(Path(__file__).with_name("pool_main.py"))
_GUARD = "trap '' HUP INT TERM; read -r _; kill -KILL 0"


class CallFailed(RuntimeError):
    """The function raised (the message is the error's type and text; a note has the traceback), could not be
    loaded, or its process was killed from outside.
    """


class CallLost(RuntimeError):
    """The function did not return: its deadline passed, or it crashed its process. The pool goes on."""


class DeadlinePassed(CallLost):
    """The function took too long."""


class KillableProcess:
    """One process of the pool with its guard, and the socket to it."""

    def __init__(self, maker: str, say: Callable[[str], None] | None) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self._channel, child_end = socket.socketpair()
        self._lines = self._channel.makefile("rb")
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,
        )
        # Hash randomisation off: what a library makes from a set is the same in every process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", _MAIN, maker],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL if say is None else subprocess.PIPE,
                stderr=subprocess.DEVNULL if say is None else subprocess.STDOUT,
                env=environment,
                process_group=self._guard.pid,
            )
        if say is not None:
            output = self._process.stdout
            threading.Thread(target=_pass_on, args=(output, say), name="pool output", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it still runs, and its guard too: somebody may have killed one of them."""
        return self._process.poll() is None and self._guard.poll() is None

    def exchange(self, line: bytes, deadline_s: float) -> dict[str, Any]:
        """Send a line and wait for the answer. Raises CallLost or CallFailed if none comes; the process is
        dead then.
        """
        try:
            self._channel.settimeout(deadline_s)
            self._channel.sendall(line)
            answer = self._lines.readline()
        except TimeoutError:
            self.kill()
            raise DeadlinePassed(f"no answer within {deadline_s:g} s") from None
        except (OSError, ValueError):  # the socket is broken: it has died; or closed: it was killed
            answer = b""
        if answer.endswith(b"\n"):
            return loads(answer)
        code = self._exit_code()
        self.kill()
        if code == -signal.SIGKILL:  # by close(), or by the kernel because memory was full
            raise CallFailed("its process was killed")
        ending = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        raise CallLost(f"it crashed its process ({ending})")

    def _exit_code(self) -> int | None:
        """Return the exit code of a process whose socket is at its end; one that has only closed it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GONE_S)
        return None

    def kill(self) -> None:
        """End the process, with what it has started."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
            started = _descendants(self._process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            for process in started:
                with contextlib.suppress(psutil.Error):  # it looks first whether the pid is still the same
                    process.kill()
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.communicate(timeout=GONE_S)

    def close(self) -> None:
        """Let go of the socket; for the thread that makes the calls."""
        self._lines.close()
        self._channel.close()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _pass_on(output: IO[bytes], say: Callable[[str], None]) -> None:
    """Hand on what a process prints, LINES_A_SECOND at most: it must not keep the node busy."""
    began_s, passed, dropped = time.monotonic(), 0, 0
    with output:
        while line := output.readline(LINE_BYTES):
            if time.monotonic() - began_s >= 1.0:
                if dropped:
                    say(f"({dropped} lines of output were left out)")
                began_s, passed, dropped = time.monotonic(), 0, 0
            if passed < LINES_A_SECOND:
                say(line.decode("utf-8", "replace").rstrip("\r\n"))
                passed += 1
            else:
                dropped += 1
    if dropped:
        say(f"({dropped} lines of output were left out)")
