"""A listing of protocol/, or of a part of it, parsed into records, beats and flags."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.directory.file_names import (
    Beat,
    Flag,
    ProfileRequest,
    Record,
    parse_profile_name,
    parse_protocol_name,
)
from coordinator.directory.layout import RunDir
from rollout.storage import files


@dataclass(frozen=True)
class Board:
    """A listing, parsed. It holds file names, never contents; a higher number supersedes a lower one, and no
    file is removed to say something.
    """

    records: tuple[int, ...]
    """Numbers of the epoch records, highest first."""
    beats: dict[int, Beat]
    """The newest beat of each rank's newest incarnation."""
    flags: frozenset[Flag]
    calls: tuple[Flag, ...]
    """Flags that say something else than that a phase is done or an epoch entered, in a fixed order."""
    entries: dict[str, Beat | Flag | Record]
    """What was listed, by name; unknown names are left out."""
    profiles: tuple[ProfileRequest, ...] = ()
    """What is asked of nodes by those who look at the run."""

    def done(self, epoch: int, iteration: int, phase: int) -> dict[int, Flag]:
        """By rank, the flags that say that a phase is done; of iteration 0, that the epoch is entered."""
        place = (epoch, iteration, phase)
        return {flag.rank: flag for flag in self.flags if flag[:3] == place and not flag.is_call}

    def called(self, epoch: int, kind: str) -> list[Flag]:
        """Calls of one kind in an epoch."""
        return [flag for flag in self.calls if flag.epoch == epoch and flag.kind == kind]

    def newest_epoch(self) -> int:
        """Return the highest epoch that any name carries; 0 on an empty board."""
        return max([0, *self.records, *(beat.epoch for beat in self.beats.values())])

    def highest_incarnation(self, rank: int) -> int:
        """Return the highest incarnation of `rank` that beats; 0 if none."""
        return self.beats[rank].incarnation if rank in self.beats else 0


def parse(names: Iterable[str], before: Board | None = None) -> Board:
    """Return a board from a listing; unknown names are ignored. Names of the board `before` are not parsed
    again: most names are in many listings.
    """
    known = before.entries if before is not None else {}
    entries: dict[str, Beat | Flag | Record] = {}
    records: list[int] = []
    beats: dict[int, Beat] = {}
    flags: list[Flag] = []
    profiles: list[ProfileRequest] = []
    for name in names:
        entry = known.get(name) or parse_protocol_name(name)
        if entry is None:
            if (request := parse_profile_name(name)) is not None:
                profiles.append(request)
            continue
        entries[name] = entry
        if isinstance(entry, Flag):
            flags.append(entry)
        elif isinstance(entry, Beat):
            newest = beats.get(entry.rank)
            if newest is None or (entry[2:], entry) > (newest[2:], newest):
                beats[entry.rank] = entry
        else:
            records.append(entry.epoch)
    calls = tuple(sorted(flag for flag in flags if flag.is_call))
    numbers = tuple(sorted(records, reverse=True))
    return Board(numbers, beats, frozenset(flags), calls, entries, tuple(profiles))


def whole_board(run_dir: RunDir, names: Callable[[Path], Iterable[str]] = files.listing) -> Board:
    """Return the Board of all nodes; `names` lists a directory."""
    return parse(name for directory in run_dir.protocol for name in names(directory))


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 1, 2`."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"
