"""End user code that holds the event loop or does not let go of it, and take whatever it raises: a group must
not cost the others.
"""

import asyncio
import logging
import signal
import sysconfig
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

CANCEL_S = 5.0
"""How long a cancelled task may take to end before it is cut off."""
AGAIN_S = 2.0
"""When a loop that was late is looked at again: the whole process may have been suspended."""
BLOCKED_S = 30.0
"""A loop that is blocked for longer is said, with the line that blocks it; far below most limits."""
_OURS = ("rollout.", "coordinator.")
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@contextmanager
def interrupting(limit_s: float, name: str) -> Iterator[Callable[[], None]]:
    """Raise TimeoutError in what blocks the event loop for longer than `limit_s`; `name` is the setting. Warn
    before, with its line, if the limit is long.

    Yields what a coroutine calls now and then to say that the loop is free. The error comes by a signal. So
    it ends what sleeps or computes in Python, but not what computes in C: that ends with its process. In
    another thread than the main one this has no effect.
    """
    waits_s = [limit_s, AGAIN_S]
    if limit_s > 2 * BLOCKED_S:
        waits_s = [BLOCKED_S, AGAIN_S, limit_s - BLOCKED_S - AGAIN_S, AGAIN_S]
    signals = 0  # since the loop was free

    def say_free() -> None:
        nonlocal signals
        signals = 0
        signal.setitimer(signal.ITIMER_REAL, waits_s[0])

    def interrupt(_number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals < len(waits_s):
            signal.setitimer(signal.ITIMER_REAL, waits_s[signals])
            if signals == 2 and (line := _users_line(frame)):
                log.warning(
                    "%s has blocked the event loop of all groups for %.0f s: `await` what is slow, or run it "
                    "with asyncio.to_thread; it is ended after %s = %g",
                    *(line, BLOCKED_S, name, limit_s),
                )
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


def _users_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code that the loop runs in this frame; empty without one."""
    while frame and not (module := frame.f_globals.get("__name__", "")).startswith("asyncio."):
        file = frame.f_code.co_filename
        if not module.startswith(_OURS) and not file.startswith(("<", *_LIBRARIES)):
            return f"{file}, line {frame.f_lineno},"
        frame = frame.f_back
    return ""


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
