"""The chunks that guests make, as two collectors see them.

A guest's own says in claims/ which of its chunks are made, and in which parts (OwnChunks). The master's waits
for them, counts them with what the nodes make, and gives back those of a guest that is gone (GuestChunks).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.directory.claims import ClaimListing, Claims, Owner
from coordinator.directory.file_names import ClaimKind
from coordinator.directory.layout import GUESTS
from coordinator.directory.parts import WrittenPart, first_finished, read_parts
from coordinator.protocol.chunks import Chunk
from coordinator.protocol.liveness import Stopwatch
from rollout.engine_places import Meter
from rollout.origin import Origin
from rollout.trajectory import Group

Counts = Callable[[Group], bool]
"""Whether a group counts as one of those that are needed."""


class GuestsPresent(NamedTuple):
    """The guests, as the master sees them."""

    lost: Collection[int]
    present: Mapping[int, int]
    """Who is there, by rank, as which incarnation."""


@dataclass
class Contribution:
    """What a guest has made of a chunk."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    """The parts that hold it, with their checksums."""
    uncounted: int = 0
    """How many of its groups do not count: others have to be made in their place."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By slot, how long the groups were in flight that this process has made."""


@dataclass
class GuestContributions:
    """What guests have contributed to a phase, as the master's flag says it."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    timings: dict[str, tuple[dict[str, float], int]] = field(
        default_factory=dict[str, tuple[dict[str, float], int]]
    )
    """By rank, as JSON has it: the seconds of its groups, and its width (protocol.chunks.RankTimings)."""

    def add(self, rank: int, document: Mapping[str, Any]) -> None:
        """Take in what a guest says of a chunk that it has made."""
        self.parts |= document["parts"]
        before, _ = self.timings.get(str(rank), ({}, 0))
        self.timings[str(rank)] = ({**before, **document["seconds"]}, document["width"])


class GuestChunks:
    """The master's view of the chunks that guests have claimed: the phase is not over while one of them is
    still being made, and what a guest that is gone has left is given back.
    """

    def __init__(self, claims: Claims, presence: Callable[[], GuestsPresent], patience_s: float) -> None:
        """`patience_s`: for how long a guest may make chunks that the master has never seen beat."""
        self._claims = claims
        self._presence = presence
        self._patience_s = patience_s
        self._owners: dict[int, Owner] = {}
        self._unseen: dict[int, Stopwatch] = {}
        self._left: set[tuple[ClaimKind, int]] = set()
        self._read: set[int] = set()

    def look(
        self,
        claimed: Iterable[int],
        shown: ClaimListing,
        from_guests: GuestContributions,
        is_tail: bool = False,
    ) -> tuple[list[int], int]:
        """Add to `from_guests` what guests say of those `claimed` numbers that nobody claims again; returns
        those that are still being made, and how many groups have to be made in the place of others.
        `is_tail`: nothing is free, so the others are waited for. A mount may hide their new names for long,
        but not their files.
        """
        open_numbers, uncounted = list[int](), 0
        if not shown.guests and not self._presence().present:
            return open_numbers, uncounted
        for number in claimed:
            owner = self._owner(number)
            if number in self._read or (owner is not None and owner.rank < GUESTS):
                continue
            is_made = number in shown.finished
            if owner is not None and (is_made or is_tail):
                document = self._claims.read_made(number)
                if document is not None:
                    from_guests.add(owner.rank, document)
                    uncounted += document["uncounted"]
                    self._read.add(number)
                    continue
            if not is_made and self._is_gone(number, owner):
                self._claims.give_back(number)
            open_numbers.append(number)
        self._leave(shown)
        return open_numbers, uncounted

    def _owner(self, number: int) -> Owner | None:
        if number not in self._owners and (owner := self._claims.owner(number)) is not None:
            self._owners[number] = owner
        return self._owners.get(number)

    def _is_gone(self, number: int, owner: Owner | None) -> bool:
        """Return whether nobody makes a chunk: its `owner` is lost, or another process has its place; or
        nobody has been seen for long who could have claimed it.
        """
        lost, present = self._presence()
        if owner is not None and (owner.rank in present or owner.rank in lost):
            return owner.rank in lost or present[owner.rank] > owner.incarnation
        return self._unseen.setdefault(number, Stopwatch(1.0)).look() > self._patience_s

    def _leave(self, shown: ClaimListing) -> None:
        claimed = {number for number, owner in self._owners.items() if owner.rank >= GUESTS}
        names: dict[ClaimKind, set[int]] = {
            "g": shown.guests, "m": shown.finished, "b": shown.back, "c": claimed
        }  # fmt: skip
        new: set[tuple[ClaimKind, int]] = set()
        for kind, numbers in names.items():
            new |= {(kind, number) for number in numbers}
        new -= self._left
        self._claims.leave(new)
        self._left |= new


class OwnChunks:
    """The chunks that a guest has claimed, until they are made and durable."""

    def __init__(self, claims: Claims, meter: Meter, counts: Counts) -> None:
        self._claims = claims
        self._meter = meter
        self._counts = counts
        self._open: dict[int, tuple[set[int], Contribution]] = {}
        """By number: the slots that are not durable, and what is."""

    def begin(self, number: int, slots: Iterable[int], contribution: Contribution) -> None:
        """Take in that a chunk is claimed, of which these slots are to be made: the rest is there already."""
        self._open[number] = (set(slots), contribution)
        self._say_if_made(number)

    def make_durable(self, written: WrittenPart) -> None:
        """Take in that groups are durable, and say which chunks are made."""
        seconds = self._meter.seconds
        for number, (slots, contribution) in list(self._open.items()):
            groups = [group for group in written.groups if group.slot in slots]
            if not groups:
                continue
            slots -= {group.slot for group in groups}
            contribution.parts[written.name] = written.sha256
            contribution.uncounted += sum(not self._counts(group) for group in groups)
            contribution.seconds |= {
                str(group.slot): round(seconds[group.slot], 4) for group in groups if group.slot in seconds
            }
            self._say_if_made(number)

    def _say_if_made(self, number: int) -> None:
        slots, contribution = self._open[number]
        if not slots:
            self._claims.say_made(number, {**asdict(contribution), "width": self._meter.width})
            del self._open[number]


def rest_of(chunk: Chunk, directory: Path, origin: Origin, counts: Counts) -> tuple[list[int], Contribution]:
    """Return the slots of a chunk that no guest has finished, and what guests have."""
    contribution, finished = Contribution(), set[int]()
    parts = read_parts(directory, origin, set_aside=False)
    for part, groups in first_finished(part for part in parts if part.name.rank >= GUESTS):
        for group in groups:
            if group.slot in chunk.slots and group.given_up is None:
                contribution.parts[part.name.name] = part.sha256
                contribution.uncounted += not counts(group)
                finished.add(group.slot)
    return [slot for slot in chunk.slots if slot not in finished], contribution
