"""Slots, each of which becomes a group, and where a collector takes them from."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollout.environments.turns import opening, turns_of
from rollout.tasks.task_set import Task
from rollout.trajectory import Group, Sample, Turn


@dataclass(frozen=True)
class Slot:
    """One group to make: the slot's number in the iteration, its task, its group seed, and the group as the
    iteration before has left it, if that has begun it.
    """

    number: int
    task: Task
    seed: int
    begun: Group | None = None
    kind: str = ""
    """Name of the `Recipe` that makes it; empty: the collector's own."""

    @property
    def task_id(self) -> str:
        """The task's id as groups have it, after its kind if it has one: `gsm8k/12`."""
        return f"{self.kind}/{self.task['id']}" if self.kind else self.task["id"]

    def tombstone(self, reason: str) -> Group:
        """Return the group that says why the slot is given up for good."""
        return Group(self.number, self.task_id, self.prompt, [], given_up=reason)

    @property
    def prompt(self) -> str:
        """For people: the task's prompt, or its messages, with their roles if there are several."""
        first, *more = self._opening
        if not more:
            return first.text
        return "\n\n".join(f"{turn.role}: {turn.text}" for turn in self._opening)

    @property
    def _opening(self) -> list[Turn]:
        return turns_of(opening(self.task))

    def leave_prompt_out(self, samples: Iterable[Sample], stop: Sequence[str]) -> None:
        """Leave in the samples' turns what they say beyond the prompt; nothing if that is the sample's text
        alone, which ends before the string of `stop` that ended it.
        """
        opening = self._opening
        for sample in samples:
            if sample.turns[: len(opening)] == opening:
                sample.turns = sample.turns[len(opening) :]
            texts = [sample.text, *(sample.text + end for end in stop)]
            if len(sample.turns) == 1 and sample.turns[0].text in texts:
                sample.turns = []


class InFlight(NamedTuple):
    """A group that is being made: its slot, its worker, and the time of the event loop when it was begun."""

    slot: Slot
    worker: asyncio.Task[None]
    begun_s: float


class SlotSource(Protocol):
    """Gives out slots, one after the other, and hears which groups have ended."""

    @property
    def total(self) -> int:
        """How many slots it has at most."""
        ...

    @property
    def needed(self) -> int:
        """How many groups are to be made of the slots that it has given out, and of those it still has."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether `needed` may still grow."""
        ...

    @property
    def has_spare(self) -> bool:
        """Whether a spare slot may be left."""
        ...

    async def take(self, wants_spare: Callable[[], bool]) -> Slot | None:
        """Return the next slot, a spare one only if `wants_spare`; None when there is no other."""
        ...

    def end(self, group: Group) -> None:
        """Hear that a group has ended, also one that is given up."""
        ...


class ListedSlots:
    """Slots that are all known from the beginning: the first `needed` ones are needed, the others spare."""

    is_open = False

    def __init__(self, slots: Sequence[Slot], needed: int | None = None, in_flight: int = 0) -> None:
        """`needed`: default all; `in_flight`: how many the collector has in flight, which are needed too."""
        self.total = len(slots)
        self._needed = len(slots) if needed is None else needed
        self.needed = self._needed + in_flight
        self._slots = slots
        self._given = 0

    @property
    def has_spare(self) -> bool:
        """Whether a spare slot is left, when the needed ones are begun."""
        return self._given < self.total

    async def take(self, wants_spare: Callable[[], bool]) -> Slot | None:
        """Return the next slot, a spare one only if `wants_spare`; None when there is no other."""
        if self._given >= self.total or (self._given >= self._needed and not wants_spare()):
            return None
        self._given += 1
        return self._slots[self._given - 1]

    def end(self, group: Group) -> None:
        """Need not hear it."""
