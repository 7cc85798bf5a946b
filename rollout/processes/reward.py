"""Rewards that a library computes, in processes that may be killed (`pool`)."""

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from rollout.processes.pool import CallLost, ProcessPool

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Of one completion; a usual one takes a millisecond."""


class ProcessReward:
    """A reward function: `arguments(task, completion)` are handed to the function that `maker` makes in a
    process of the pool (`ProcessPool`), which returns the reward.

    A completion that takes longer than DEADLINE_S, or that crashes the process, earns 0, as in the field: it
    is the completion that is out of bounds. `library` is what `maker` imports, `extra` what installs it.
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
        self._library = library
        self._extra = extra

    def __call__(self, task: dict[str, Any], completion: str) -> float:
        """The reward; CallFailed if the function raises. Blocks: for threads."""
        try:
            return self._pool.call(*self._arguments(task, completion), deadline_s=DEADLINE_S)
        except CallLost as lost:
            log.warning("task %r: %s; reward 0 for the completion %.200r", task["id"], lost, completion)
            return 0.0

    @property
    def missing(self) -> str | None:
        """What to do about the library, if it is not installed."""
        return missing(self._library, self._extra)


def missing(library: str, extra: str) -> str | None:
    """How to install `library`, if it is not there. Does not import it."""
    if importlib.util.find_spec(library) is not None:
        return None
    return f"{library} is not installed; it is the extra {extra!r}: pip install -e '.[{extra}]'"
