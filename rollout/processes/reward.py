"""Rewards that a library computes, in processes that can be killed (`pool`)."""

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from rollout.processes.pool import CallLost, ProcessPool

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""How long a completion may take; most take a millisecond."""


class ProcessReward:
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

    def __call__(self, task: dict[str, Any], completion: str) -> float:
        """Return the reward. Blocks, so call it in a thread. Raises CallFailed if the function raises."""
        try:
            return self._pool.call(*self._arguments(task, completion), deadline_s=DEADLINE_S)
        except CallLost as lost:
            log.warning("task %r: %s; reward 0 for the completion %.200r", task["id"], lost, completion)
            return 0.0

    @property
    def missing(self) -> str | None:
        """How to install the library; None if it is installed."""
        return missing(self.library, self._extra)


def missing(library: str, extra: str) -> str | None:
    """Return how to install `library`; None if it is installed. Does not import it."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed; it is the extra {extra!r}: pip install -e '.[{extra}]'"
