"""A pool of processes for code that may hang, crash or use up memory: libraries, and functions of the user. A
call that takes too long loses its process, and nothing else.

    node ---- socket, one line of JSON each way ---- pool_main, one for each call at a time
      \\------ pipe ---- guard: at end of file it kills the process group, itself included

The pool of concurrent.futures cannot kill a call that hangs, sends pickles, and imports the node's __main__.

*No orphan.* Each process forms a group with a guard of its own, so that ^C does not reach them, and what the
process has started ends with it. Only the node holds the write end of the guard's pipe. When the node ends in
any way, the guard kills the group, also processes that are busy in C code. A process that joins the group too
late finds its socket at end of file and exits. So a pool need not be closed. What has left the group by a
session of its own is ended where the node ends the process, and survives only if the node is killed.
"""

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from json import dumps, loads  # code of the user's may set others in the module
from pathlib import Path
from typing import IO, Any

import psutil

from rollout.environment_variables import cores
from rollout.plugins import search_path

START_TIMEOUT_S = 120.0
"""How long Python and the library may take to start. It counts against no call's deadline."""
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


@dataclass
class _Call:
    line: bytes
    """The arguments, as they are sent."""
    deadline_s: float
    future: "Future[Any]"


class ProcessPool:
    """Calls one function in other processes, `size` at a time. Processes start when needed, and stay.

    `maker` is `module:function`. It is called with `parameters` once in each process: there it imports what
    it needs and returns the function, from JSON values to a JSON value. Processes search for modules where
    this one does. Any thread may use the pool.

    `say` gets what the processes print, line by line. A pool without it runs a library: its output is
    dropped, and its memory is limited.
    """

    def __init__(
        self,
        maker: str,
        *parameters: Any,
        size: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.maker = maker
        self.size = size or min(4, cores())
        self._parameters = parameters
        self._say = say
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._workers = 0
        self._processes: set[_Process] = set()
        self._running: dict[Future[Any], _Process] = {}
        self._closed = False

    def call(self, *arguments: Any, deadline_s: float) -> Any:
        """Return the JSON value that the function returns. Raises CallFailed, or CallLost if it takes longer
        than `deadline_s` or crashes.
        """
        return self.submit(*arguments, deadline_s=deadline_s).result()

    def submit(self, *arguments: Any, deadline_s: float) -> "Future[Any]":
        """Begin a `call`, and return the Future of its value. One that has not begun can be cancelled; its
        deadline counts from its begin. TypeError if an argument is no JSON.
        """
        call = _Call(dumps(arguments).encode() + b"\n", deadline_s, Future())
        with self._lock:
            if self._closed:
                raise CallFailed("the pool is closed")
            self._calls.put(call)
            if not self._idle.acquire(blocking=False) and self._workers < self.size:
                self._start_worker()
        return call.future

    def _start_worker(self) -> None:
        """Start a thread that makes calls. If none can be started, other threads make this call; if there is
        none, RuntimeError.
        """
        try:
            threading.Thread(target=self._work, name=f"pool {self.maker}", daemon=True).start()
        except RuntimeError:  # too few are allowed
            if self._workers == 0:
                self._calls.get()
                raise
            return
        if self._workers == 0:
            atexit.register(self.close)  # so that an orderly end reaps the processes too
        self._workers += 1

    async def wait(self, *arguments: Any, deadline_s: float) -> Any:
        """Make a `call` in an event loop. If it is cancelled, the process that makes the call is killed."""
        future = self.submit(*arguments, deadline_s=deadline_s)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._end_call(future)
            raise

    def _end_call(self, future: "Future[Any]") -> None:
        with self._lock:  # held while it is killed: the process must not begin another call meanwhile
            if (process := self._running.get(future)) is not None:
                process.kill()

    def close(self) -> None:
        """Kill the processes. Calls under way and later ones raise CallFailed."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        atexit.unregister(self.close)
        for process in processes:
            process.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call.future.set_running_or_notify_cancel()
                    call.future.set_exception(CallFailed("the pool is closed"))
        for _ in range(self._workers):
            self._calls.put(None)

    def _next(self) -> _Call | None:
        try:
            return self._calls.get_nowait()
        except queue.Empty:
            self._idle.release()
            return self._calls.get()

    def _work(self) -> None:
        """Make one call after another, in a process of this thread's own."""
        process: _Process | None = None
        while (call := self._next()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if process is None or not process.alive:
                    self._end(process)
                    process = self._start()
                with self._lock:
                    self._running[call.future] = process
                try:
                    answer = process.exchange(call.line, call.deadline_s)
                finally:
                    with self._lock:
                        self._running.pop(call.future)
                if "error" in answer:
                    raise _failure(answer["error"], answer["traceback"])
                call.future.set_result(answer["value"])
            except BaseException as error:
                call.future.set_exception(error)
        self._end(process)

    def _end(self, process: "_Process | None") -> None:
        if process is not None:
            process.kill()
            process.close()
            with self._lock:
                self._processes.discard(process)

    def _start(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise CallFailed("the pool is closed")
            process = _Process(self.maker, self._say)
            self._processes.add(process)
        first = {"parameters": self._parameters, "path": search_path(), "is_library": self._say is None}
        try:
            answer = process.exchange(dumps(first).encode() + b"\n", START_TIMEOUT_S)
            if "error" in answer:
                raise _failure(f"{self.maker}: {answer['error']}", answer["traceback"])
            return process
        except CallLost as lost:  # no call is at fault
            self._end(process)
            raise CallFailed(f"{self.maker}: a process that should run it did not start: {lost}") from None
        except BaseException:
            self._end(process)
            raise


class _Process:
    """One process of the pool with its guard, and the socket to it."""

    def __init__(self, maker: str, say: Callable[[str], None] | None) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self._channel, theirs = socket.socketpair()
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
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", _MAIN, maker],
                stdin=theirs.fileno(),
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
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        raise CallLost(f"it crashed its process ({how})")

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


def _failure(error: str, traceback: str) -> CallFailed:
    failure = CallFailed(error)
    failure.add_note(traceback)
    return failure


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
