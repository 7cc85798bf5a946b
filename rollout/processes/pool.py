"""A pool of processes for library code that may hang, crash or use up memory. A call that takes too long
loses its process, and nothing else.

    node ---- socket, one line of JSON each way ---- pool_main, one for each call at a time
      \\------ pipe ---- guard: at end of file it kills the pool's process group, itself included

The pool of concurrent.futures cannot kill a call that hangs, sends pickles, and imports the node's __main__.

*No orphan.* The guard and the processes form a process group of their own, so that ^C does not reach them.
Only the node holds the write end of the guard's pipe. When the node ends in any way, the guard kills the
group, also processes that are busy in C code. A process that joins the group too late finds its socket at end
of file and exits. So a pool need not be closed.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

START_TIMEOUT_S = 120.0
"""How long Python and the library may take to start. It counts against no call's deadline."""
GONE_S = 5.0
"""How long a killed process may take to vanish."""
_GUARD = "trap '' HUP INT TERM; read -r _; kill -KILL 0"


class CallFailed(RuntimeError):
    """The function raised (the message is the error's type and text), could not be loaded, or its process
    was killed from outside.
    """


class CallLost(RuntimeError):
    """The function did not return: its deadline passed, or it crashed its process. The pool goes on."""


class ProcessPool:
    """Calls one function in other processes, `size` at a time. Processes start when needed, and stay.

    `maker` is `module:function`. It is called once in each process: there it imports what it needs and
    returns the function, from JSON values to a JSON value. Any thread may use the pool.
    """

    def __init__(self, maker: str, *, size: int | None = None) -> None:
        self.maker = maker
        self._places = threading.BoundedSemaphore(size or min(4, os.cpu_count() or 1))
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._closed = False

    def call(self, *arguments: Any, deadline_s: float) -> Any:
        """Return the JSON value that the function returns. Raises CallFailed, or CallLost if it takes longer
        than `deadline_s` or crashes.
        """
        with self._places:  # the calls before this one have deadlines too
            process = self._take()
            try:
                answer = process.exchange(arguments, deadline_s)
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """Kill the processes. Calls under way and later ones raise CallFailed."""
        with self._lock:
            self._closed = True
            guard, self._guard = self._guard, None
        atexit.unregister(self.close)
        _end(guard)
        while self._idle:
            self._idle.pop().kill()

    def _take(self) -> "_Process":
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                process = self._idle.pop()
                if process.alive:
                    return process
                process.kill()
        with self._lock:
            if self._closed:
                raise CallFailed("the pool is closed")
            if self._guard is None:
                atexit.register(self.close)  # so that an orderly end reaps them too
            if self._guard is None or self._guard.poll() is not None:  # somebody killed it
                _end(self._guard)
                self._guard = _start_guard()
            process = _Process(self.maker, self._guard.pid)
        try:
            answer = process.exchange(None, START_TIMEOUT_S)
        except CallLost as lost:  # no call is at fault
            raise CallFailed(f"{self.maker}: a process that should run it did not start: {lost}") from None
        except BaseException:
            process.kill()
            raise
        if "error" in answer:
            process.kill()
            raise CallFailed(f"{self.maker}: {answer['error']}")
        return process


class _Process:
    """One process of the pool, and the socket to it."""

    def __init__(self, maker: str, group: int) -> None:
        self._channel, theirs = socket.socketpair()
        self._lines = self._channel.makefile("rb")
        # Hash randomisation off: what a library makes from a set is the same in every process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.processes.pool_main", maker],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                process_group=group,
            )

    @property
    def alive(self) -> bool:
        """Whether it still runs: it may be killed while it is idle."""
        return self._process.poll() is None

    def exchange(self, arguments: tuple[Any, ...] | None, deadline_s: float) -> dict[str, Any]:
        """Send the arguments (None: send nothing, the process is starting) and wait for the answer. Raises
        CallLost or CallFailed if none comes; the process is dead then.
        """
        self._channel.settimeout(deadline_s)
        try:
            if arguments is not None:
                self._channel.sendall(json.dumps(arguments).encode() + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            self.kill()
            raise CallLost(f"no answer within {deadline_s:g} s") from None
        except OSError:  # the socket is broken: it has died
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self.kill()
        if code == -signal.SIGKILL:  # by close(), or by the kernel because memory was full
            raise CallFailed("its process was killed")
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        raise CallLost(f"it crashed its process ({how})")

    def kill(self) -> int | None:
        """End the process. Returns its exit code, or None if it still runs after GONE_S."""
        self._process.kill()
        self._lines.close()
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GONE_S)
        return None


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        process_group=0,
    )


def _end(guard: subprocess.Popen[bytes] | None) -> None:
    """Close the guard's pipe, so that it ends its group."""
    if guard is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.communicate(timeout=GONE_S)
