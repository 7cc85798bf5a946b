"""End user code that holds the event loop or does not let go of it, and take whatever it raises: a group must
not cost the others.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

CANCEL_S = 5.0
"""How long a cancelled task may take to end before it is cut off."""
AGAIN_S = 2.0
"""When a loop that was late is looked at again: the whole process may have been suspended."""


@contextmanager
def interrupting(limit_s: float, name: str) -> Iterator[Callable[[], None]]:
    """Raise TimeoutError in what blocks the event loop for longer than `limit_s`; `name` is the setting.

    Yields what a coroutine calls now and then to say that the loop is free. The error comes by a signal. So
    it ends what sleeps or computes in Python, but not what computes in C: that ends with its process. In
    another thread than the main one this has no effect.
    """
    was_late = False

    def say_free() -> None:
        nonlocal was_late
        was_late = False
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal was_late
        if not was_late:
            was_late = True
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        say_free()
        raise TimeoutError(f"it has blocked the event loop for longer than {name} = {limit_s:g}")

    try:
        before: Any = signal.signal(signal.SIGALRM, interrupt)
    except ValueError:  # signals are for the main thread
        yield lambda: None
        return
    try:
        yield say_free
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


async def outcome_of(work: Coroutine[Any, Any, T]) -> T | BaseException:
    """Return the value of user code, or the exception that it has raised: any, also the CancelledError of
    tasks of its own, a SystemExit, a KeyboardInterrupt, or what a test library raises.
    """
    try:
        return await work
    except GeneratorExit:  # it is cut off
        raise
    except BaseException as error:
        return error


async def end(tasks: Collection["asyncio.Task[Any]"], noun: str) -> None:
    """Cancel tasks and wait for their ends. One that goes on is cut off after CANCEL_S, with an error: user
    code may catch CancelledError. `noun` are the tasks, in the plural.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    unfinished = (await asyncio.wait(running, timeout=CANCEL_S))[1] if running else set()
    if unfinished:
        loop = asyncio.get_running_loop()
        if loop.get_exception_handler() is None:
            loop.set_exception_handler(_pass_over_cut_off)
        log.error(
            "%d of the %s did not end when cancelled, so cut off: the environment must let "
            "asyncio.CancelledError pass",
            len(unfinished),
            noun,
        )
    for task in unfinished:
        with suppress(RuntimeError):  # it catches this too
            task.get_coro().close()  # type: ignore[union-attr]
        task.cancel()
        asyncio._unregister_task(task)  # else the loop waits for it at its end  # type: ignore[attr-defined]


def _pass_over_cut_off(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Show what asyncio says of a task, but not of one that is cut off, of which everything is said."""
    if str(context.get("exception")) != "cannot reuse already awaited coroutine":
        loop.default_exception_handler(context)
