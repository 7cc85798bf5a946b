"""A pool of processes for code that may hang, crash or use up memory: libraries, and functions of the user. A
call that takes too long loses its process, and nothing else.

The pool of concurrent.futures cannot kill a call that hangs, sends pickles, and imports the node's __main__.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from json import dumps  # code of the user's may set others in the module
from typing import Any

from rollout.environment_variables import cores
from rollout.module_search import search_path
from rollout.processes.killable_process import CallFailed, CallLost, KillableProcess

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""How long Python and the library may take to start. It counts against no call's deadline."""


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
        self._processes: set[KillableProcess] = set()
        self._running: dict[Future[Any], KillableProcess] = {}
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
        process: KillableProcess | None = None
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

    def _end(self, process: "KillableProcess | None") -> None:
        if process is not None:
            process.kill()
            process.close()
            with self._lock:
                self._processes.discard(process)

    def _start(self) -> "KillableProcess":
        with self._lock:
            if self._closed:
                raise CallFailed("the pool is closed")
            process = KillableProcess(self.maker, self._say)
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


def log_as(name: str) -> Callable[[str], None]:
    """Return a `say` for a ProcessPool, which logs the lines as those of `name`."""
    return functools.partial(log.info, "%s: %s", name)


def _failure(error: str, traceback: str) -> CallFailed:
    failure = CallFailed(error)
    if traceback:
        failure.add_note(traceback)
    return failure
