"""A user's own code, as the cluster tests plug it in."""

import asyncio
import ctypes
import logging.config
import os
import sys
import time
from typing import Any

import numpy as np

from rollout import Episode, Policy, Sample, Sampling, single_turn


async def digits(_task: dict[str, Any], completion: str) -> float:
    """The share of digits: something that random weights already vary in. A coroutine, which a node calls
    itself: for each sync reward it starts processes that import for a second of CPU.
    """
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


async def never(_task: dict[str, Any], _completion: str) -> float:
    """A reward that does not come."""
    await asyncio.sleep(3600)
    return 1.0


async def leaving(_task: dict[str, Any], _completion: str) -> float:
    """A reward that exits."""
    raise SystemExit(3)


def letters(_task: dict[str, Any], completion: str) -> float:
    """The share of letters."""
    return sum(character.isalpha() for character in completion) / max(1, len(completion))


def broken(_task: dict[str, Any], _completion: str) -> float:
    """A reward with a mistake in it."""
    raise RuntimeError("this reward is broken")


async def blocking(_task: dict[str, Any], completion: str) -> float:
    """A reward that holds the event loop on a node that is started with BLOCKS=1, and with BLOCKS=all the
    interpreter.
    """
    if blocks := os.environ.get("BLOCKS"):
        print("blocking now", flush=True)
        if blocks == "all":
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
            library.pthread_mutex_init(mutex, None)
            for _ in range(2):  # the second time waits, whatever signal comes
                library.pthread_mutex_lock(mutex)
        time.sleep(120)
    return await digits(_task, completion)


async def slow(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn, and at least SLOW_S seconds a group."""
    await asyncio.sleep(float(os.environ.get("SLOW_S", "0.3")))
    return await single_turn(task, policy, sampling)


async def looking_twice(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Shows the task's picture, then one that depends on what was said to it."""
    return await asyncio.gather(*(_looked_twice(task, policy.episode(j)) for j in range(sampling.n)))


async def _looked_twice(task: dict[str, Any], episode: Episode) -> Sample:
    turn = await episode.generate(task["messages"], max_tokens=4)
    picture = np.full((32, 32, 3), sum(turn.token_ids) % 256, np.uint8)
    await episode.generate([{"role": "user", "content": [{"type": "image", "image": picture}]}])
    return episode.sample()


async def ending(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn; a task with the field `ends` ends the process."""
    if task.get("ends"):
        os._exit(3)
    return await single_turn(task, policy, sampling)


async def muting(_task: dict[str, Any], _completion: str) -> float:
    """A reward that fails, of a process whose log, streams and directory it has changed."""
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    logging.disable(logging.CRITICAL)
    os.chdir("/")
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    for descriptor in (1, 2):
        os.close(descriptor)
    raise SystemExit(0)


def first_number(task: dict[str, Any]) -> int:
    """Of an arithmetic task: 12 of 12+34."""
    return int(task["id"].partition("+")[0])


async def stuck(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn, but a quarter of the tasks never come to an end."""
    if first_number(task) % 4 == 0:
        await asyncio.sleep(3600)
    return await single_turn(task, policy, sampling)


async def stuck_here(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn, but on a node with STUCK in its environment no task comes to an end."""
    if "STUCK" in os.environ:
        await asyncio.sleep(3600)
    return await single_turn(task, policy, sampling)


async def flat(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn, with rewards of its own: the same for all samples where the first number is even."""
    samples = await single_turn(task, policy, sampling)
    for j, sample in enumerate(samples):
        sample.reward = float(j if first_number(task) % 2 else 1)
    return samples


def picky(_task: dict[str, Any], completion: str) -> float:
    """A reward that cannot deal with a third of the completions."""
    if sum(map(ord, completion)) % 3 == 0:
        raise ValueError("not that one")
    return 1.0


def constant(_task: dict[str, Any], _completion: str) -> float:
    """A reward that no group varies in."""
    return 0.5
