"""GATHER (the master) and PENDING (a worker): how the nodes of an epoch come together."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock

from coordinator.machine import network
from coordinator.machine.host_lock import acquire, host_lock
from coordinator.node.node import Node, Position
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.records import (
    MASTER,
    EpochRecord,
    Event,
    Member,
    Verdict,
    claim,
    new_token,
    read_beat,
)
from coordinator.protocol.shares import share_sizes
from coordinator.protocol.snapshot import Board, ranks_text
from coordinator.settings import ClusterSettings

log = logging.getLogger(__name__)

LOCK_PATIENCE_S = 10.0
"""How long an older process of our rank on this host may take to end."""


def gather(node: Node, prepare: Callable[[Node], None]) -> EpochRecord:
    """Claim a lobby, wait until every rank beats in it, and claim the next number as the full record.

    A master that is in an epoch already takes that one for the lobby: its members beat in it.
    """
    lobby = node.watch.leave()
    node.position = Position("gathering")
    if lobby is None:
        lobby = claim_next(node, "lobby")
        node.watch.heart.beat(lobby.epoch)
    since = lobby.epoch
    prepare(node)
    cluster = node.settings.cluster
    shrinks_s = None
    if cluster.on_node_failure == "shrink":
        shrinks_s = time.monotonic() + (0.0 if node.lost else cluster.node_timeout_s)

    def together(board: Board) -> dict[int, Member] | None:
        absent = _absent(node, board, since)
        complete = not absent or (shrinks_s is not None and time.monotonic() >= shrinks_s)
        return _members(node, board, absent) if complete else None

    def check() -> None:
        node.check()
        node.check_still_master()

    members = node.watch.wait(
        together,
        check,
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
    while True:
        node.check()
        board = node.watch.look()
        if board.highest_incarnation(MASTER) > node.watch.incarnation:
            raise node.superseded()
        record = new_record(node, max(board.newest_epoch(), node.newest_epoch) + 1, kind, {})
        if claim(node.run_dir, record):
            return record


def _absent(node: Node, board: Board, since: int) -> list[int]:
    """The ranks that do not beat in epoch `since` or later: only a process that saw it can.

    One that was lost must have beaten since then: its last beat may lie there in the same epoch.
    """

    def is_here(rank: int) -> bool:
        beat = board.beats.get(rank)
        if beat is None or node.watch.silence.silent_s.get(rank, 0.0) >= cluster.node_timeout_s:
            return False
        return beat.epoch >= since and beat[2:] > node.lost.get(rank, (0, -1))

    cluster = node.settings.cluster
    absent = [rank for rank in range(1, cluster.num_nodes) if not is_here(rank)]
    if unsaid := set(absent) - set(node.position.waiting_for):
        commands = "; ".join(node.worker_command(rank) for rank in sorted(unsaid))
        log.info("waiting for %s; on that machine: %s", ranks_text(unsaid), commands)
    node.position.waiting_for = absent
    return absent


def _members(node: Node, board: Board, absent: Collection[int]) -> dict[int, Member] | None:
    """Who takes part; None while a beat that is listed cannot be read: it has given way to the next one."""
    cluster = node.settings.cluster
    here = [rank for rank in range(1, cluster.num_nodes) if rank not in absent]
    said = {rank: read_beat(node.run_dir, board.beats[rank]) for rank in here}
    node.position.waiting_for = [rank for rank, content in said.items() if not content]
    if node.position.waiting_for:
        return None
    peers = [network.Peer.from_dict(content["peer"]) for content in said.values()]
    node.address = network.address_towards(node.peer, peers)
    said[MASTER] = node.describe()
    found = {rank: content.get("gpu_count", 0) for rank, content in sorted(said.items())}
    if text := gpu_shortfall(cluster, found, {rank: content["host"] for rank, content in said.items()}):
        raise Ended(Exit.FAILED, f"{text}. {node.repair()}", "failed")
    return {
        rank: Member(
            incarnation=board.beats[rank].incarnation if rank else node.watch.incarnation,
            host=content["host"],
            address=content["address"],
            processes=content["processes"],
            weight=cluster.weight(rank),
        )
        for rank, content in sorted(said.items())
    }


def gpu_shortfall(cluster: ClusterSettings, found: Mapping[int, int], hosts: Mapping[int, str]) -> str | None:
    """Which members have fewer GPUs than --expect-gpus says, and what every one has; None: all are there.

    `found` and `hosts` by rank, of the members alone. Of a total each node is expected to have its share by
    weight, and one may make up for another.
    """
    numbers = cluster.expect_gpus
    if numbers is None:
        return None
    weights = {rank: cluster.weight(rank) for rank in range(cluster.num_nodes)}
    is_total = len(numbers) == 1
    expected = share_sizes(numbers[0], weights) if is_total else dict(enumerate(numbers))
    short = [rank for rank, count in found.items() if count < expected[rank]]
    if not short or (is_total and sum(found.values()) >= sum(expected[rank] for rank in found)):
        return None
    missing = "; ".join(
        f"rank {rank} ({hosts[rank]}) has {found[rank]} of {expected[rank]}" for rank in short
    )
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in found.items())
    wanted = ",".join(str(number) for number in numbers)
    return (
        f"--expect-gpus {wanted}, but there are {sum(found.values())} GPUs ({counts}): {missing}; "
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES there, or expect fewer"
    )


def pend(node: Node) -> EpochRecord:
    """Beat in the newest epoch until a full record lists this incarnation."""
    node.watch.leave()
    node.position = Position("pending", waiting_for=[MASTER])
    announced = node.newest_epoch
    node.watch.heart.beat(announced)

    def admitted(board: Board) -> EpochRecord | None:
        nonlocal announced
        newest = node.watch.records.newest(board.records)
        if newest is None:
            return None
        _check_pending(node, board, newest)
        if newest.epoch > announced:
            announced = newest.epoch
            node.watch.heart.beat(announced)
        member = newest.members.get(node.rank)
        mine = member is not None and member.incarnation == node.watch.incarnation
        return newest if newest.kind == "full" and mine else None

    cluster = node.settings.cluster
    started_s = time.monotonic()

    def check() -> None:
        """Under `shrink` a master that lives takes this node in at its next iteration, however late."""
        node.check()
        waited_s = time.monotonic() - started_s
        if cluster.on_node_failure == "shrink":
            waited_s = min(waited_s, node.watch.silence.silent_s.get(MASTER, 0.0))
        if waited_s > cluster.rejoin_timeout_s:
            text = f"the master did not take rank {node.rank} in within {waited_s:.0f} s; see what it prints"
            raise Ended(Exit.LOST, text)

    record = node.watch.wait(admitted, check, lambda _board: "the master to take this node in")
    assert record is not None  # without a time limit
    return record


def _check_pending(node: Node, board: Board, newest: EpochRecord) -> None:
    """Raise what the newest epoch has already come to, if anything."""
    member = newest.members.get(node.rank)
    highest = max(board.highest_incarnation(node.rank), member.incarnation if member else 0)
    if highest > node.watch.incarnation:
        raise node.superseded()
    if newest.kind == "finished":
        raise Ended(Exit.DONE, "the run is finished")
    for kind, event in (("failed", Event.FAILED), ("gave_up", Event.GAVE_UP), ("stopped", Event.STOPPED)):
        for flag in board.called(newest.epoch, kind):
            if flag.rank == MASTER:
                raise node.ending(Verdict(event, MASTER, flag))


def hold_host_lock(node: Node) -> FileLock:
    """One process of a rank on a host. An older one ends when it sees our record; if it is stuck, it is
    killed.

    Beside the lock lies who holds it: the pid, and when that process was created, since pids are used again.
    """
    lock = host_lock(f"{node.run_id}.rank{node.rank}")
    holder = Path(lock.lock_file).with_suffix(".pid")
    if not acquire(lock, node.check, LOCK_PATIENCE_S):
        _kill(holder)
        if not acquire(lock, node.check, LOCK_PATIENCE_S):
            text = f"another process of rank {node.rank} on this host does not end; its pid is in {holder}"
            raise Ended(Exit.FAILED, text)
    me = psutil.Process()
    holder.write_text(f"{me.pid} {me.create_time()}")
    return lock


def _kill(holder: Path) -> None:
    try:
        pid, created_s = holder.read_text().split()
        process = psutil.Process(int(pid))
        if process.create_time() == float(created_s):
            log.warning("killing the older process of this rank on this host, pid %s: it does not end", pid)
            process.kill()
    except (OSError, ValueError, psutil.Error) as error:
        log.warning("the older process of this rank on this host cannot be ended: %s", error)
