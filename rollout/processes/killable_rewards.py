"""Rewards that run in processes which can be killed (`pool`): those of a library, and sync functions."""

import asyncio
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from rollout.environment_variables import cores
from rollout.loaded_code import load_as_it_was, sources
from rollout.module_search import is_installed
from rollout.plugins import load_function
from rollout.processes.killable_process import CallLost, DeadlinePassed
from rollout.processes.pool import ProcessPool, log_as
from rollout.processes.reward_signatures import with_our_parameters

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""How long a library may take for a completion; most take a millisecond."""
MOST_PROCESSES = 8
"""Processes that call a sync function, at most, unless the setting says otherwise."""


class LibraryReward:
    """A reward function that runs in a process of a pool. There, the function that `maker` makes is called
    with `arguments(task, completion)` and returns the reward (`ProcessPool`).

    A completion that takes longer than DEADLINE_S, or that crashes the process, gets 0: the completion is at
    fault. `maker` imports `library`; the extra `extra` installs it.
    """

    def __init__(
        self,
        maker: str,
        arguments: Callable[[dict[str, Any], str], tuple[Any, ...]],
        *,
        library: str,
        extra: str,
    ) -> None:
        self._pool = ProcessPool(maker)
        self._arguments = arguments
        self._extra = extra
        self.library = library
        self.__module__ = maker.partition(":")[0]  # as of a function: where it is defined

    async def __call__(self, task: dict[str, Any], completion: str) -> float:
        """Return the reward. Raises CallFailed if the function raises."""
        call = self._pool.submit(*self._arguments(task, completion), deadline_s=DEADLINE_S)
        try:
            return await asyncio.wrap_future(call)
        except CallLost as lost:
            log.warning("task %r: %s; reward 0 for the completion %.200r", task["id"], lost, completion)
            return 0.0

    def check(self, task: dict[str, Any]) -> None:
        """Raise ValueError if no completion of the task can be scored."""
        self._arguments(task, "")

    @property
    def missing(self) -> str | None:
        """How to install the library; None if it is installed."""
        return missing(self.library, self._extra)


def missing(library: str, extra: str) -> str | None:
    """Return how to install `library`; None if it is installed. Does not import it."""
    if is_installed(library):
        return None
    return f"{library} is not installed; it is the extra {extra!r}: pip install -e '.[{extra}]'"


class SyncReward:
    """A sync reward function. Processes load it by its name, and call it there: whatever it does, the node's
    own process goes on.
    """

    def __init__(self, name: str, function: Callable[..., Any], *parameters: Any) -> None:
        """`name`: `module:function`, whose function is loaded in this process too. It gets the parameters,
        which are JSON, behind task and completion.
        """
        self.__wrapped__ = function
        self._pool = _pool_of(name, function, parameters)

    async def __call__(self, task: Any, completion: Any, *, timeout_s: float, processes: int | None) -> Any:
        """Return the function's value for a sample, or for lists of them. Raises CallFailed if it raises,
        CallLost if it takes longer than `timeout_s` or ends its process.
        """
        self._pool.size = processes or min(MOST_PROCESSES, cores())
        try:
            return await asyncio.wrap_future(self._pool.submit(task, completion, deadline_s=timeout_s))
        except DeadlinePassed as late:
            raise DeadlinePassed(f"{late} (rollout.reward_timeout_s)") from None


_pools: dict[str, ProcessPool] = {}


def _pool_of(name: str, function: Callable[..., Any], parameters: tuple[Any, ...]) -> ProcessPool:
    """Return the pool of a function, which stays: its processes have loaded what it needs."""
    key = f"{name} {json.dumps(parameters)}" if parameters else name
    if key not in _pools:
        maker = f"{__name__}:make_sync"
        _pools[key] = ProcessPool(maker, name, sources(name, function), parameters, say=log_as(name))
    return _pools[key]


# ---- in the processes


def make_sync(name: str, loaded: dict[str, tuple[str, str]], parameters: list[Any]) -> Callable[..., Any]:
    """Load the function `name` from the source that the node has loaded, whatever its file has become."""
    load_as_it_was(loaded)
    function = with_our_parameters(load_function(name))

    @functools.wraps(function)
    def call(task: dict[str, Any], completion: str) -> Any:
        result = function(task, completion, *parameters)
        return runner().run(_awaited(result)) if hasattr(result, "__await__") else result

    @functools.cache
    def runner() -> asyncio.Runner:
        return asyncio.Runner()  # one loop for all calls: the function may keep a client that belongs to it

    return call


async def _awaited(result: Any) -> Any:
    return await result
