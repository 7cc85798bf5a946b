"""An asyncio event loop whose time is the simulation's: its pauses are waits of the task that runs it."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.simulation.scheduler import Killed, Scheduler

T = TypeVar("T")

THREAD = "to_thread"
POLL_S = 0.02
"""How soon a coroutine goes on after a thread that it has waited for."""
LAST_STEPS = 20
"""Steps in which the coroutines of a killed process come to their end."""


class _Selector(selectors.BaseSelector):
    """Watches no file: it only lets time pass."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_last = False

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.is_last or (timeout is not None and timeout <= 0):
            return []
        self._scheduler.wait(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError("a simulated event loop has no files")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError("a simulated event loop has no files")

    def get_map(self) -> Any:
        return {}


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, scheduler: Scheduler) -> None:
        self.selector = _Selector(scheduler)
        self._scheduler = scheduler
        super().__init__(self.selector)

    def time(self) -> float:
        return self._scheduler.now_s

    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        pass


def run_coroutine(scheduler: Scheduler, main: Coroutine[Any, Any, Any]) -> Any:
    """As asyncio.run. If the process is killed meanwhile, what its coroutines still do has no effect."""
    loop = _Loop(scheduler)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.selector.is_last = scheduler.process.killed
        loop.set_exception_handler(lambda *_: None)
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: _Loop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    for _ in range(LAST_STEPS):
        if all(task.done() for task in left):
            break
        loop.call_soon(loop.stop)
        try:
            loop.run_forever()
        except Killed:
            continue
    for task in left:
        if task.done() and not task.cancelled():
            task.exception()  # it has been seen


class _Runner:
    """The simulation's asyncio.Runner. What its coroutines do after the process was killed has no effect."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loop = _Loop(scheduler)

    def get_loop(self) -> _Loop:
        return self._loop

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        if self._scheduler.process.killed:
            main.close()
            raise Killed
        try:
            return self._loop.run_until_complete(main)
        finally:
            self._loop.selector.is_last = self._scheduler.process.killed

    def close(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)
        _cancel_all(self._loop)
        self._loop.close()


class Asyncio:
    """In place of the module `asyncio`: its loop and its threads are the simulation's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` and, like the real one, wait for the threads that it has left."""
        process = self._scheduler.process
        before = set(process.tasks)
        try:
            return run_coroutine(self._scheduler, main)
        finally:
            while not process.killed and any(task.name == THREAD for task in set(process.tasks) - before):
                self._scheduler.wait(POLL_S)

    def Runner(self, *, loop_factory: Callable[[], Any]) -> _Runner:
        return _Runner(self._scheduler)

    async def to_thread(self, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)` in another task of this process."""
        result: list[T] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                result.append(call(*args))
            except Exception as error:
                failure.append(error)

        task = self._scheduler.spawn(self._scheduler.process, run, THREAD)
        while not task.is_done:
            await asyncio.sleep(POLL_S)
        if failure:
            raise failure[0]
        return result[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)
