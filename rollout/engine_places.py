"""How many groups the engine is given at once, and how fast they are made."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rollout.trajectory import Group


@dataclass
class Meter:
    """How fast a collector makes groups."""

    width: int
    """How many groups it may have in flight at once."""
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    """By slot: how long each group that was made was in flight."""

    def add(self, group: Group, seconds: float) -> None:
        """Take in a group that was in flight for so long."""
        if group.given_up is None:
            self.seconds[group.slot] = seconds

    def pace(self, costs: Mapping[int, float]) -> float | None:
        """Cost a second of one group, by the costs of slots; None while nothing is known."""
        known = self.seconds.keys() & costs.keys()
        busy_s = sum(self.seconds[slot] for slot in known)
        return sum(costs[slot] for slot in known) / busy_s if busy_s > 0 else None


class Place:
    """A place in the engine: taken from a semaphore by `async with`, and left once, at its end or before."""

    busy_s = 0.0
    """Seconds from `begin` until it was left."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_taken = False
        self._begun_s = math.inf

    async def __aenter__(self) -> Self:
        await self._places.acquire()
        self._is_taken = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    def begin(self) -> None:
        """Begin to use it."""
        self._begun_s = asyncio.get_running_loop().time()

    def leave(self) -> None:
        """Let another group have it."""
        if self._is_taken:
            self._is_taken = False
            self.busy_s = asyncio.get_running_loop().time() - self._begun_s
            self._places.release()
