"""The meaning of a snapshot of protocol/ for a node: one pure decision."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import MASTER
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.snapshot import Board


class Event(Enum):
    """What a board can mean for a node that runs."""

    NEW_EPOCH = "a newer epoch record lists this node, or another node replaced one"
    FINISHED = "the run is finished"
    MOVED = "the devices of the run were placed anew"
    SUPERSEDED = "a newer process has taken over this rank, or the run"
    FAILED = "a node reported an error that ends the run"
    STOPPED = "the master was interrupted"
    GAVE_UP = "the master gave up"
    LEFT = "a node left"
    SILENT = "a node is silent"
    STALLED = "a node beats, but its phase and its progress stand still"
    TRAINER_FAILED = "the training job failed on a node"
    RETURNED = "a member was restarted: a higher incarnation of it beats"


LOSSES = frozenset({Event.LEFT, Event.SILENT, Event.STALLED})
"""What means that a node is lost."""


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
    """Return the first thing in the snapshot that ends the phase this node is in, or None.

    A worker holds for a lost master for `master_patience_s`; None: it ends when the master left or is silent.
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


def has_left(board: Board, record: EpochRecord | None, rank: int) -> bool:
    """Return whether the process that takes part in the epoch has said that it leaves, or its reaper that it
    has died.
    """
    if record is None or all(flag.rank != rank for flag in board.called(record.epoch, "left")):
        return False
    member = record.members.get(rank)
    return member is None or board.highest_incarnation(rank) <= member.incarnation


def _newer_record(newest: EpochRecord, current: EpochRecord, rank: int, incarnation: int) -> Verdict:
    """Return the Verdict on a newer record: a process that it lists for this one has taken over."""
    if newest.kind == "moved":
        return Verdict(Event.MOVED)
    member = newest.members.get(rank)
    if member is not None and member.incarnation > incarnation:
        return Verdict(Event.SUPERSEDED, rank)
    if rank == MASTER and newest.master_incarnation != incarnation:
        return Verdict(Event.SUPERSEDED, rank)
    if newest.kind == "finished":
        return Verdict(Event.FINISHED)
    return Verdict(Event.NEW_EPOCH)
