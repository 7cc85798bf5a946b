"""Wait, as a worker or a guest, until an epoch takes this node in."""

import logging
import time
from dataclasses import dataclass, field

from coordinator.directory.layout import MASTER
from coordinator.machine import network
from coordinator.node.node_wait import NodeWait
from coordinator.node.phase_endings import CODES, MOVED
from coordinator.node.position import GATHERING
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.snapshot import Board
from coordinator.protocol.verdict import Verdict
from rollout.storage.retry import CACHED_S

log = logging.getLogger(__name__)

CALLS = {event.name.lower(): event for event in CODES}
"""Calls of a master with which a run ends."""


@dataclass
class Pending(NodeWait):
    """A node's wait for its master, before each epoch."""

    _is_unseen: bool = field(default=False, init=False)
    """Whether it was said that the master does not see this node."""

    def find_address(self) -> None:
        """Find this node's address towards the master, which its first beat must say. Raises Ended, or
        NetworkError if no network leads there for cluster.rejoin_timeout_s.
        """
        watch, me, check = self.watch, self.identity, self.phase_endings.check
        # A listing may show what was there before for this long.
        patience_s = max(self._cluster.node_timeout_s, CACHED_S + 5.0)
        heartbeat = watch.wait(lambda _: watch.heartbeat(MASTER) or None, check, lambda: "rank 0", patience_s)
        if heartbeat is None:
            raise NodeEnded(Exit.LOST, f"the master has gone while {me.name} was starting")
        unreached: list[network.NetworkError] = []

        def reaches_master(_board: Board) -> bool | None:
            me.peers = [network.Peer.from_dict((watch.heartbeat(MASTER) or heartbeat)["peer"])]
            try:
                me.find_address()
            except network.NetworkError as error:
                if not unreached:
                    log.info("waiting for a network to the master: %s", error)
                unreached[:] = [error]
                return None
            return True

        patience_s = self._cluster.rejoin_timeout_s
        if not watch.wait(reaches_master, check, lambda: "a network to the master", patience_s):
            raise unreached[0]

    def pend(self) -> EpochRecord:
        """Beat in the newest epoch until a full record lists this incarnation; returns that record. No record
        lists a guest, which takes any.
        """
        watch, rank = self.watch, self.identity.rank
        watch.leave()
        self.position.move("pending", waiting_for=[MASTER])
        announced = self.identity.newest_epoch
        watch.heart.beat(announced)

        def admitted(board: Board) -> EpochRecord | None:
            nonlocal announced
            newest = watch.records.newest(board.records)
            if newest is None:
                return None
            self._check_pending(board, newest)
            if newest.epoch > announced:
                announced = newest.epoch
                watch.heart.beat(announced)
            member = newest.members.get(rank)
            is_member = member is not None and member.incarnation == watch.incarnation
            return newest if newest.kind == "full" and (is_member or self.identity.is_guest) else None

        started_s = time.monotonic()
        asks_s = 0.0

        def check() -> None:
            """With `shrink` a master that lives lets this node in at its next iteration, however late."""
            nonlocal asks_s
            self.phase_endings.check()
            waited_s = time.monotonic() - started_s
            if waited_s >= asks_s:  # a newer process may have left: then no record ever lists it
                asks_s = waited_s + self._cluster.node_timeout_s
                if watch.heart.is_replaced():
                    raise self.phase_endings.superseded()
                if waited_s >= self._cluster.node_timeout_s and not self._is_unseen:
                    self._say_if_unseen()
            silent_s = watch.silence.silent_s.get(MASTER, 0.0)
            waited_s = failure_policy(self._cluster.on_node_failure).left_out_s(waited_s, silent_s)
            waited_s = silent_s if self.identity.is_guest else waited_s
            if waited_s > self._cluster.rejoin_timeout_s:
                me = self.identity.name
                text = f"the master did not take {me} in within {waited_s:.0f} s; see what it prints"
                raise NodeEnded(Exit.LOST, text)

        record = watch.wait(
            admitted, check, lambda: f"the master to take this node in{self.messages.elsewhere()}"
        )
        assert record is not None  # without a time limit
        return record

    def _say_if_unseen(self) -> None:
        """Say once that the master, which gathers and is seen here, does not see this node."""
        heartbeat, limit_s = self.watch.heartbeat(MASTER), self._cluster.node_timeout_s
        gathers = heartbeat.get("state") == GATHERING and heartbeat["row_s"] >= limit_s
        is_there = self.watch.silence.silent_s.get(MASTER, 0.0) < limit_s
        silent_s = heartbeat.get("silent_s", {}).get(str(self.identity.rank), limit_s)
        if gathers and is_there and silent_s >= limit_s:
            self._is_unseen = True
            log.error("%s", self.messages.unseen(heartbeat["host"], limit_s))

    def _check_pending(self, board: Board, newest: EpochRecord) -> None:
        """Raise what the newest epoch has already come to, if anything."""
        member = newest.members.get(self.identity.rank)
        if member is not None and member.incarnation > self.watch.incarnation:
            raise self.phase_endings.superseded()
        if newest.kind == "finished":
            raise NodeEnded(Exit.DONE, "the run is finished")
        if newest.kind == "moved":
            raise NodeEnded(Exit.MOVED, MOVED)
        for kind, event in CALLS.items():
            for flag in board.called(newest.epoch, kind):
                if flag.rank == MASTER:
                    raise self.phase_endings.ending_of(Verdict(event, MASTER, flag))
