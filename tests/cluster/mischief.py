"""User code that changes or harms its process: each call does the next thing of ACTS, once."""

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout import Policy, Sample, Sampling, single_turn
from tests.cluster.plugins import digits

FOLDER = "MISCHIEF"
"""The environment variable with the directory that has a file for each act that was done."""


def _hang() -> None:
    time.sleep(3600)


def _raise(error: BaseException) -> None:
    raise error


class Failed(BaseException):
    """No Exception, as what `pytest.fail` raises."""


def _close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


async def _wait_for_a_thread() -> None:
    await asyncio.to_thread(_hang)


ACTS: Mapping[str, Callable[[], Any]] = {
    "os._exit": lambda: os._exit(3),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sys.exit": lambda: sys.exit(5),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "a BaseException": lambda: _raise(Failed()),
    "a background thread": lambda: threading.Thread(target=_hang).start(),
    "a job of an executor": lambda: ThreadPoolExecutor().submit(_hang),
    "a handler of atexit": lambda: atexit.register(_hang),
    "another directory": lambda: os.chdir("/"),
    "signals ignored": _ignore_signals,
    "streams closed": _close_streams,
    "a thread that is waited for": _wait_for_a_thread,
}


def _next_act() -> Callable[[], Any]:
    for name, act in ACTS.items():
        try:
            (Path(os.environ[FOLDER]) / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        return act
    return lambda: None


def waits(task: dict[str, Any], completion: str) -> float:
    """A sync reward, which a process of a pool calls."""
    act = _next_act()
    if act is ACTS["a thread that is waited for"]:
        _hang()
    act()
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


async def scores(task: dict[str, Any], completion: str) -> float:
    """An async reward."""
    if asyncio.iscoroutine(waited := _next_act()()):
        await waited
    return await digits(task, completion)


async def acts(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """An environment."""
    if asyncio.iscoroutine(waited := _next_act()()):
        await waited
    return await single_turn(task, policy, sampling)
