"""GATHER (the master) and PENDING (a worker): how the nodes of an epoch come together."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from coordinator import network
from coordinator.board import Board
from coordinator.epochs import MASTER, EpochRecord, Event, Member, Verdict, claim, new_token
from coordinator.node import Node, Position
from coordinator.outcome import Ended, Exit
from coordinator.watch import ranks_text

log = logging.getLogger(__name__)


def gather(node: Node, prepare: Callable[[Node], None]) -> EpochRecord:
    """Claim a lobby, wait until every rank beats in it, and claim the next number as the full record.

    A master that is in an epoch already takes that one for the lobby: its members beat in it.
    """
    lobby = node.watch.leave()
    node.position = Position("gathering")
    if lobby is None:
        lobby = claim_next(node, "lobby")
        node.watch.announce_epoch(lobby.epoch)
    since = lobby.epoch
    prepare(node)
    cluster = node.settings.cluster
    members = node.watch.wait(
        lambda board: _members(node, board) if _all_here(node, board, since) else None,
        lambda: _check_still_master(node),
        lambda _board: f"{ranks_text(node.position.waiting_for)} to start",
        cluster.rejoin_timeout_s,
    )
    if members is None:
        who = ranks_text(node.position.waiting_for)
        commands = "; ".join(node.worker_command(rank) for rank in node.position.waiting_for)
        text = f"{who} did not come within {cluster.rejoin_timeout_s:.0f} s. On that machine: {commands}"
        raise Ended(Exit.LOST, text, "gave_up")
    record = new_record(node, since + 1, "full", members)
    if not claim(node.run_dir, record):
        raise node.superseded()
    return record


def new_record(
    node: Node, number: int, kind: Literal["lobby", "full", "finished"], members: dict[int, Member]
) -> EpochRecord:
    """A record that this master may claim."""
    return EpochRecord(
        epoch=number,
        kind=kind,
        token=new_token(),
        run_id=node.run_id,
        master_incarnation=node.watch.incarnation,
        master_host=node.host,
        settings=node.settings.model_dump(mode="json"),
        members=members,
    )


def claim_next(node: Node, kind: Literal["lobby", "finished"]) -> EpochRecord:
    """Claim the first free number above all that the board shows: the newest master wins."""
    number = max(node.watch.look().newest_epoch(), node.newest_epoch)
    while True:
        number += 1
        record = new_record(node, number, kind, {})
        if claim(node.run_dir, record):
            return record


def _all_here(node: Node, board: Board, since: int) -> bool:
    """Whether every rank beats in epoch `since` or later: only a process that saw it can."""
    others = range(1, node.settings.cluster.num_nodes)
    absent = [rank for rank in others if rank not in board.beats or board.beats[rank].epoch < since]
    if absent and not node.position.waiting_for:
        commands = "; ".join(node.worker_command(rank) for rank in absent)
        log.info("waiting for %s; on that machine: %s", ranks_text(absent), commands)
    node.position.waiting_for = absent
    return not absent


def _check_still_master(node: Node) -> None:
    node.check()
    newest = node.watch.newest_record()
    if newest is not None and newest.master_incarnation != node.watch.incarnation:
        raise node.superseded()


def _members(node: Node, board: Board) -> dict[int, Member] | None:
    """Who takes part; None while a beat that is listed cannot be read: a listing may be old."""
    cluster = node.settings.cluster
    said = {rank: node.watch.said(rank) for rank in range(1, cluster.num_nodes)}
    node.position.waiting_for = [rank for rank, content in said.items() if not content]
    if node.position.waiting_for:
        return None
    peers = [network.Peer.from_dict(content["peer"]) for content in said.values()]
    node.address = network.address_towards(node.peer, peers)
    said[MASTER] = node.describe()
    return {
        rank: Member(
            incarnation=board.beats[rank].incarnation,
            host=content["host"],
            address=content["address"],
            processes=content["processes"],
            weight=cluster.weight(rank),
        )
        for rank, content in sorted(said.items())
    }


def pend(node: Node) -> EpochRecord:
    """Beat in the newest epoch until a full record lists this incarnation."""
    node.watch.leave()
    node.position = Position("pending", waiting_for=[MASTER])
    announced = node.newest_epoch
    node.watch.announce_epoch(announced)

    def admitted(board: Board) -> EpochRecord | None:
        nonlocal announced
        newest = node.watch.records.newest(board.records)
        if newest is None:
            return None
        _check_pending(node, board, newest)
        if newest.epoch > announced:
            announced = newest.epoch
            node.watch.announce_epoch(announced)
        member = newest.members.get(node.rank)
        mine = member is not None and member.incarnation == node.watch.incarnation
        return newest if newest.kind == "full" and mine else None

    timeout_s = node.settings.cluster.rejoin_timeout_s
    record = node.watch.wait(
        admitted, node.check, lambda _board: "the master to take this node in", timeout_s
    )
    if record is None:
        text = f"the master did not take rank {node.rank} in within {timeout_s:.0f} s; see what it prints"
        raise Ended(Exit.LOST, text)
    return record


def _check_pending(node: Node, board: Board, newest: EpochRecord) -> None:
    """Raise what the newest epoch has already come to, if anything."""
    member = newest.members.get(node.rank)
    if member is not None and member.incarnation > node.watch.incarnation:
        raise node.superseded()
    if newest.kind == "finished":
        raise Ended(Exit.DONE, "the run is finished")
    for kind, event in (("failed", Event.FAILED), ("gave_up", Event.GAVE_UP), ("stopped", Event.STOPPED)):
        for flag in board.called(newest.epoch, kind):
            if flag.rank == MASTER:
                raise node.ending(Verdict(event, MASTER, flag))


def hold_host_lock(node: Node) -> FileLock:
    """One process of a rank on a host: an older one ends when it sees our record, and lets go of the lock."""
    folder = Path(tempfile.gettempdir()) / f"flagpost-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(folder / f"{node.run_id}.rank{node.rank}.lock")
    try:
        lock.acquire(timeout=node.settings.cluster.node_timeout_s)
    except Timeout:
        text = f"another process of rank {node.rank} on this host does not end (it holds {lock.lock_file})"
        raise Ended(Exit.FAILED, f"{text}; end it", "failed") from None
    return lock
