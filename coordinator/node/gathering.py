"""Gather the nodes of an epoch, as its master: who is there, who comes back, and which record says so."""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import MASTER
from coordinator.machine import network
from coordinator.machine.run_command import STARTED_BY
from coordinator.node.node_wait import NodeWait
from coordinator.node.position import GATHERING
from coordinator.protocol.back_off import BackOff
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.failed_starts import NOT_STARTED, FailedStarts
from coordinator.protocol.heartbeat import read_beats
from coordinator.protocol.on_node_failure import FailurePolicy, failure_policy
from coordinator.protocol.records import EpochRecord, GivenSettings, Member, claim, new_token
from coordinator.protocol.snapshot import Board
from coordinator.protocol.split_slots import share_sizes
from coordinator.protocol.verdict import has_left
from coordinator.settings.cluster import ClusterSettings
from rollout.storage.retry import CACHED_S

log = logging.getLogger(__name__)


@dataclass
class Gathering(NodeWait):
    """Brings the nodes of a run, or those that are there, into an epoch; for its master."""

    describe: Callable[[], dict[str, Any]]
    """Says what this node's heartbeat says."""
    lost: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]], init=False)
    """Ranks that are lost, with the (incarnation, counter) of the last beat that was seen of each."""
    _back_off: BackOff = field(default_factory=BackOff, init=False)
    _known: dict[int, tuple[int, dict[str, Any]]] = field(
        default_factory=dict[int, tuple[int, dict[str, Any]]], init=False
    )
    """By rank: the incarnation of a process, and the content of its heartbeat."""
    _unreached: network.NetworkError | None = field(default=None, init=False)
    """The error of the last search for an address; None: one was found."""

    def __post_init__(self) -> None:
        self._failed_starts = FailedStarts(self.identity.run_dir)

    @property
    def _failure_policy(self) -> FailurePolicy:
        return failure_policy(self._cluster.on_node_failure)

    def gather(self, prepare: Callable[[], None]) -> EpochRecord:
        """Claim a lobby, wait until every rank beats in it, and claim the next number as the full record.

        A master that is in an epoch already takes that one for the lobby: its members beat in it. `prepare`
        is called meanwhile.
        """
        lobby = self.watch.leave()
        self.position.move(GATHERING)
        self._count_losses(lobby)
        if lobby is None:
            lobby = self.claim_next("lobby")
            self.watch.heart.beat(lobby.epoch)
        prepare()
        members = self._wait_for_members(lobby)
        record = self._new_record(lobby.epoch + 1, "full", members)
        if not claim(self.identity.run_dir, record):
            raise self.phase_endings.superseded()
        return record

    def _count_losses(self, record: EpochRecord | None) -> None:
        """Keep out for a while who is lost again and again, where the others go on without it."""
        cluster, board = self._cluster, self.watch.board
        for rank, member in record.members.items() if record and self._failure_policy.shrinks else ():
            if rank in self.lost or (rank and board.highest_incarnation(rank) > member.incarnation):
                most_s = cluster.rejoin_timeout_s / 4
                pause_s = self._back_off.lose(rank, time.monotonic(), cluster.node_timeout_s, most_s)
                if pause_s > 0:
                    times = f"{self._back_off.losses(rank)} times before it finished an iteration"
                    name = self.identity.run_dir.name(rank)
                    log.warning("%s was lost %s: it is let in again after %.0f s", name, times, pause_s)

    def settle(self) -> None:
        """Take in that the members of this epoch have finished an iteration."""
        self._back_off.settle(self.watch.record.members)

    def claim_next(self, kind: Literal["lobby", "finished"]) -> EpochRecord:
        """Claim the first free number above all that the directory shows: the newest master wins. Raises
        Ended if numbers stay taken that no listing shows.
        """
        until_s = time.monotonic() + CACHED_S
        while True:
            self.phase_endings.check()
            board = self.watch.look(own_too=True)
            if board.highest_incarnation(MASTER) > self.watch.incarnation:
                raise self.phase_endings.superseded()
            number = max(board.newest_epoch(), self.identity.newest_epoch) + 1
            record = self._new_record(number, kind, {})
            if claim(self.identity.run_dir, record):
                return record
            if time.monotonic() > until_s:
                text = f"{self.identity.root}: epoch {number} is taken, and for {CACHED_S:.0f} s no listing"
                raise NodeEnded(Exit.FAILED, f"{text} has shown by whom; {self.messages.doctor_command()}")
            log.info("epoch %d is taken: looking again", number)
            time.sleep(self._cluster.poll_max_s)

    def finish(self) -> None:
        """Say that nothing is left to do: workers end with 0, also those that wait for a master."""
        current = self.watch.current
        if current is None:
            self.claim_next("finished")
        elif not claim(
            self.identity.run_dir, self._new_record(current.epoch + 1, "finished", current.members)
        ):
            raise self.phase_endings.superseded()

    def returned(self) -> bool:
        """Return whether a rank that was left out (`shrink`) beats in this epoch: it is let in with a new
        one.
        """
        record = self.watch.record
        absent = set(range(self._cluster.num_nodes)) - set(record.members)
        if not absent:
            return False
        board, now_s = self.watch.look(), time.monotonic()
        back = [rank for rank in absent if rank in board.beats and not self._back_off.is_out(rank, now_s)]
        return any(board.beats[rank].epoch >= record.epoch for rank in back)

    def _new_record(
        self, number: int, kind: Literal["lobby", "full", "finished"], members: dict[int, Member]
    ) -> EpochRecord:
        me = self.identity
        return EpochRecord(
            epoch=number,
            kind=kind,
            token=new_token(),
            run_id=me.run_id,
            master_incarnation=self.watch.incarnation,
            master_host=me.host,
            settings=me.of_run.model_dump(mode="json"),
            given=GivenSettings(host=me.host, settings=dict(me.overrides))
            if me.overrides is not None
            else None,
            inputs=me.inputs.codes(),
            members=members,
        )

    def _wait_for_members(self, lobby: EpochRecord) -> dict[int, Member]:
        """Wait until every rank beats in the epoch `lobby`, or, with `shrink`, for a while."""
        cluster = self._cluster
        self._known.clear()  # a node may have another address than in the epoch before
        ends_s = time.monotonic() + self._failure_policy.gathers_for_s(cluster, bool(self.lost))

        def together(board: Board) -> dict[int, Member] | None:
            absent = self._absent(board, lobby)
            complete = not absent or time.monotonic() >= ends_s
            return self._members(board, absent) if complete else None

        def check() -> None:
            self.phase_endings.check()
            self.phase_endings.check_still_master()

        def missing() -> str:
            return f"{self.identity.run_dir.names(self.position.waiting_for)} to start"

        members = self.watch.wait(together, check, missing, cluster.rejoin_timeout_s)
        if members is None and self._unreached is not None:
            raise self._unreached
        if members is None:
            names = self.identity.run_dir.names(self.position.waiting_for)
            commands = self._commands(self.position.waiting_for)
            text = (
                f"{names} did not come within {cluster.rejoin_timeout_s:.0f} s. On that machine: {commands}"
            )
            raise NodeEnded(Exit.LOST, text, "gave_up")
        return members

    def _commands(self, ranks: Collection[int]) -> str:
        return "; ".join(self.messages.node_command(rank) for rank in sorted(ranks))

    def _absent(self, board: Board, lobby: EpochRecord) -> list[int]:
        """Return the ranks that do not beat in the epoch `lobby` or later: only a process that saw it can.

        A rank that was lost must have beaten since then: its last beat may be in the same epoch.
        """
        since = lobby.epoch

        def is_here(rank: int) -> bool:
            beat = board.beats.get(rank)
            silent_s = self.watch.silence.silent_s.get(rank, 0.0)
            if beat is None or silent_s >= self._cluster.node_timeout_s:
                return False
            if has_left(board, lobby, rank) or self._back_off.is_out(rank, time.monotonic()):
                return False
            return beat.epoch >= since and beat[2:] > self.lost.get(rank, (0, -1))

        absent = [rank for rank in range(1, self._cluster.num_nodes) if not is_here(rank)]
        if unsaid := set(absent) - set(self.position.waiting_for):
            starts = "" if STARTED_BY in os.environ else f"; on that machine: {self._commands(unsaid)}"
            log.info("waiting for %s%s", self.identity.run_dir.names(unsaid), starts)
        self.position.wait_for(absent)
        for flag in board.called(since, NOT_STARTED):
            if flag.rank in absent and (text := self._failed_starts.new(flag)):
                log.error("%s. Then, on that machine: %s", text, self.messages.node_command(flag.rank))
        return absent

    def _members(self, board: Board, absent: Collection[int]) -> dict[int, Member] | None:
        """Return who takes part; None while a listed beat cannot be read: the next one has replaced it."""
        me, cluster = self.identity, self._cluster
        present = [rank for rank in range(1, cluster.num_nodes) if rank not in absent]
        contents = self._contents_of({rank: board.beats[rank] for rank in present})
        unread = [rank for rank in present if rank not in contents]
        self.position.wait_for(unread)
        if unread:
            return None
        me.peers = [network.Peer.from_dict(content["peer"]) for content in contents.values()]
        try:
            me.find_address()
            self._unreached = None
        except network.NetworkError as error:
            self._known.clear()  # they may have got other addresses since
            if self._unreached is None:
                log.info("waiting for a network to the others: %s", error)
            self._unreached = error
            return None
        contents[MASTER] = self.describe()
        gpu_counts = {rank: content.get("gpu_count", 0) for rank, content in sorted(contents.items())}
        hosts = {rank: content["host"] for rank, content in contents.items()}
        trains = me.settings.rl_phase != "rollout"
        if text := gpu_shortfall(cluster, gpu_counts, hosts) or (
            trains and half_with_gpus(gpu_counts, hosts)
        ):
            raise NodeEnded(Exit.FAILED, f"{text}. {self.messages.repair()}", "failed")
        return {
            rank: Member(
                incarnation=board.beats[rank].incarnation if rank else self.watch.incarnation,
                host=content["host"],
                address=content["address"],
                processes=content["processes"],
                weight=cluster.weight(rank) if cluster.rank_weights else content["processes"],
                gpu_bytes=content.get("gpu_bytes"),
                host_bytes=content.get("host_bytes", 0.0),
            )
            for rank, content in sorted(contents.items())
        }

    def _contents_of(self, beats: Mapping[int, Beat]) -> dict[int, dict[str, Any]]:
        """Return the contents of beats, by rank, without those that cannot be read; each process's is read
        once.
        """
        known = {rank: (beat.incarnation, self._known.get(rank)) for rank, beat in beats.items()}
        new = {
            rank: beats[rank] for rank, (number, before) in known.items() if not before or before[0] != number
        }
        for rank, content in read_beats(self.identity.run_dir, new).items():
            if content:
                self._known[rank] = (beats[rank].incarnation, content)
        return {
            rank: self._known[rank][1]
            for rank, beat in beats.items()
            if rank in self._known and self._known[rank][0] == beat.incarnation
        }


def gpu_shortfall(
    cluster: ClusterSettings, gpu_counts: Mapping[int, int], hosts: Mapping[int, str]
) -> str | None:
    """Return which members have fewer GPUs than --expect-gpus says, and what each has; None: all are there.

    `gpu_counts` and `hosts` by rank, of the members alone. Of a total each node is expected to have its share
    by weight, and one may make up for another.
    """
    numbers = cluster.expect_gpus
    if numbers is None:
        return None
    weights = {rank: cluster.weight(rank) for rank in range(cluster.num_nodes)}
    is_total = len(numbers) == 1
    expected = share_sizes(numbers[0], weights) if is_total else dict(enumerate(numbers))
    short = [rank for rank, count in gpu_counts.items() if count < expected[rank]]
    if not short or (is_total and sum(gpu_counts.values()) >= sum(expected[rank] for rank in gpu_counts)):
        return None
    missing = "; ".join(
        f"rank {rank} ({hosts[rank]}) has {gpu_counts[rank]} of {expected[rank]}" for rank in short
    )
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in gpu_counts.items())
    numbers_text = ",".join(str(number) for number in numbers)
    return (
        f"--expect-gpus {numbers_text}, but there are {sum(gpu_counts.values())} GPUs ({counts}): {missing}; "
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES there, or expect fewer"
    )


def half_with_gpus(gpu_counts: Mapping[int, int], hosts: Mapping[int, str]) -> str | None:
    """Say that some members have GPUs and others have none, if so: they cannot add up gradients."""
    lack = [f"rank {rank} ({hosts[rank]})" for rank, count in gpu_counts.items() if not count]
    if not lack or len(lack) == len(gpu_counts):
        return None
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in gpu_counts.items())
    return (
        f"only some nodes have GPUs ({counts}), and training is on GPUs or on CPUs: {', '.join(lack)} lacks "
        "them; look at nvidia-smi there, leave these nodes out, or start all with CUDA_VISIBLE_DEVICES="
    )
