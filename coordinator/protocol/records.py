"""Epochs: records and claims, who is silent, and what follows from a board. Decisions are pure.

An epoch record says who takes part under which settings. It is claimed by creating the next number
exclusively and reading back one's own token. The highest record that parses is the current one; everything
in protocol/ carries its epoch, so what an older process still writes is never mistaken for the living
run's.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.directory.layout import Beat, Flag, Record, RunDir
from coordinator.protocol.snapshot import Board
from rollout.storage import files

MASTER = 0
"""The master's rank."""


class Member(BaseModel):
    """A node as an epoch record lists it."""

    model_config = ConfigDict(frozen=True)

    incarnation: int
    host: str
    address: str
    """Where its peers reach it."""
    processes: int
    """Training processes on it: its GPUs, or one."""
    weight: float


class EpochRecord(BaseModel):
    """The content of `eNNNN.epoch.json`."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    kind: Literal["lobby", "full", "finished"]
    token: str
    """Made by the claimant: whoever reads its own token back has won."""
    run_id: str
    master_incarnation: int
    master_host: str
    settings: dict[str, Any]
    members: dict[int, Member]


def new_token() -> str:
    """A token that no other claimant has."""
    return secrets.token_hex(8)


def claim(run_dir: RunDir, record: EpochRecord) -> bool:
    """Whether `record` is now the record of its epoch; False if somebody else's is."""
    path = run_dir.protocol / Record(record.epoch).name
    return files.create_once(path, record.model_dump_json().encode())


class Records:
    """Epoch records as read; they are immutable, so each is read once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._known: dict[int, EpochRecord] = {}

    def newest(self, numbers: Iterable[int], wait: bool = True) -> EpochRecord | None:
        """The highest of `numbers` whose record parses; a torn one is climbed over.

        `wait=False`, for the thread that beats: one that is listed but denied is climbed over too, until the
        next look.
        """
        for number in sorted(numbers, reverse=True):
            record = self._known.get(number) or self._read(number, wait)
            if record is not None:
                return record
        return None

    def _read(self, number: int, wait: bool) -> EpochRecord | None:
        try:
            data = files.read(self._run_dir.protocol / Record(number).name, fleeting=not wait)
            record = EpochRecord.model_validate_json(data)
        except (FileNotFoundError, ValidationError):
            return None
        self._known[number] = record
        return record


def read_beat(run_dir: RunDir, beat: Beat) -> dict[str, Any]:
    """A beat's content; {} if it is gone (a newer one took its place) or torn."""
    try:
        return json.loads(files.read(run_dir.protocol / beat.name, fleeting=True))
    except (FileNotFoundError, ValueError):
        return {}


class Silence:
    """For how long each rank's beat has stood still, by this node's own clock.

    Counted only over listings that succeeded, and at most two beats for each: an observer that was frozen,
    or whose filesystem was, condemns nobody (no two machines' clocks are compared).
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._last_s: float | None = None
        self._marks: dict[int, tuple[int, int]] = {}
        self.silent_s: dict[int, float] = {}

    def observe(self, board: Board, ranks: Iterable[int], now_s: float) -> None:
        """Take in one successful listing at `now_s` (monotonic)."""
        credit_s = 0.0 if self._last_s is None else min(now_s - self._last_s, 2 * self._beat_s)
        self._last_s = now_s
        for rank in ranks:
            beat = board.beats.get(rank)
            mark = (beat.incarnation, beat.counter) if beat else (0, 0)
            if mark > self._marks.get(rank, (-1, -1)):
                self._marks[rank] = mark
                self.silent_s[rank] = 0.0
            else:
                self.silent_s[rank] = self.silent_s.get(rank, 0.0) + credit_s

    def restart(self, ranks: Iterable[int]) -> None:
        """Count anew for `ranks`, from the next listing on: they have just been admitted."""
        self._last_s = None
        for rank in ranks:
            self.silent_s[rank] = 0.0


class Standstill:
    """For how long the row and the progress of each rank have stood still, although it beats.

    A rank that waits for others does not stand still. Counted as silence is, by this node's own clock.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None
        self._places: dict[int, tuple[Any, ...]] = {}
        self.still_s: dict[int, float] = {}

    def observe(self, said: Mapping[int, Mapping[str, Any]], now_s: float) -> None:
        """Take in what the newest beat of each rank says, at `now_s` (monotonic)."""
        credit_s = 0.0 if self._last_s is None else min(now_s - self._last_s, 2 * self._interval_s)
        self._last_s = now_s
        for rank, content in said.items():
            place = tuple(content.get(name) for name in ("state", "iteration", "phase", "done"))
            moves = place != self._places.get(rank) or bool(content.get("waiting_for"))
            self._places[rank] = place
            self.still_s[rank] = 0.0 if moves else self.still_s.get(rank, 0.0) + credit_s

    def forget(self, ranks: Collection[int]) -> None:
        """These do not even beat."""
        for rank in ranks:
            self._places.pop(rank, None)
            self.still_s.pop(rank, None)

    def beyond(self, limit_s: Callable[[str], float | None], grace_s: float) -> set[int]:
        """Ranks that have stood still for longer than the limit of their row, and `grace_s`."""
        limits = {rank: limit_s(str(place[2])) for rank, place in self._places.items()}
        return {
            rank for rank, most_s in limits.items()
            if most_s is not None and self.still_s.get(rank, 0.0) >= most_s + grace_s
        }  # fmt: skip

    def restart(self) -> None:
        """Count anew."""
        self._last_s = None
        self._places.clear()
        self.still_s.clear()


class Event(Enum):
    """What a board can mean for a node that runs."""

    NEW_EPOCH = "a newer epoch record lists this node, or another node replaced one"
    FINISHED = "the run is finished"
    SUPERSEDED = "a newer process has taken over this rank, or the run"
    FAILED = "a node reported an error that ends the run"
    STOPPED = "the master was interrupted"
    GAVE_UP = "the master gave up"
    LEFT = "a node left"
    SILENT = "a node is silent"
    STALLED = "a node beats, but its row and its progress stand still"
    TRAINER_FAILED = "the training job failed on a node"
    RETURNED = "a member was restarted: a higher incarnation of it beats"


@dataclass(frozen=True)
class Verdict:
    """What happened, which rank it is about, and the flag that says more."""

    event: Event
    rank: int | None = None
    flag: Flag | None = None


def decide(
    board: Board,
    newest: EpochRecord,
    current: EpochRecord,
    rank: int,
    incarnation: int,
    silent_s: Mapping[int, float],
    node_timeout_s: float,
    trainer_failure_known: bool = False,
    master_patience_s: float | None = None,
    stalled: Collection[int] = (),
) -> Verdict | None:
    """The first thing on the board that ends the row this node is in, or None.

    A worker holds for a lost master for `master_patience_s`; None: it ends when that one left or is silent.
    `current` is the epoch this node entered, `newest` the highest record. The master judges workers;
    workers judge only the master.
    """
    if newest.epoch > current.epoch:
        return _newer_record(newest, current, rank, incarnation)
    for kind, event in (
        ("failed", Event.FAILED),
        ("gave_up", Event.GAVE_UP),
        ("stopped", Event.STOPPED),
    ):
        if flags := board.called(current.epoch, kind):
            return Verdict(event, flags[0].rank, flags[0])
    judged = sorted(set(current.members) - {MASTER}) if rank == MASTER else [MASTER]
    if rank == MASTER:
        for other in judged:
            if board.highest_incarnation(other) > current.members[other].incarnation:
                return Verdict(Event.RETURNED, other)
    holding = rank != MASTER and master_patience_s is not None
    for flag in board.called(current.epoch, "left"):
        if flag.rank in judged and not holding:
            return Verdict(Event.LEFT, flag.rank, flag)
    limit_s = master_patience_s if holding and master_patience_s is not None else node_timeout_s
    for other in judged:
        if silent_s.get(other, 0.0) >= limit_s:
            return Verdict(Event.SILENT, other)
        if other in stalled:
            return Verdict(Event.STALLED, other)
    trainer_failed = board.called(current.epoch, "trainer_failed")
    if trainer_failed and not trainer_failure_known:
        return Verdict(Event.TRAINER_FAILED, trainer_failed[0].rank, trainer_failed[0])
    return None


def _newer_record(newest: EpochRecord, current: EpochRecord, rank: int, incarnation: int) -> Verdict:
    """What a newer record means: whoever it lists in our place has taken over."""
    member = newest.members.get(rank)
    if member is not None and member.incarnation > incarnation:
        return Verdict(Event.SUPERSEDED, rank)
    if rank == MASTER and newest.master_incarnation != incarnation:
        return Verdict(Event.SUPERSEDED, rank)
    if newest.kind == "finished":
        return Verdict(Event.FINISHED)
    return Verdict(Event.NEW_EPOCH)
