"""The endings of a node's phase: by its verdict on the others, a signal, its fence, an error of its watch."""

import contextlib
import logging
import signal

from coordinator.directory.layout import MASTER
from coordinator.node.identity import Identity
from coordinator.node.messages import Messages
from coordinator.node.position import Position
from coordinator.protocol.exits import EpochChanged, Exit, Fenced, NodeEnded, NodeLost, TrainerFailed
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.verdict import Event, Verdict, has_left
from coordinator.protocol.watch import Watch
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)

CODES = {Event.FAILED: Exit.FAILED, Event.STOPPED: Exit.INTERRUPTED, Event.GAVE_UP: Exit.LOST}
"""How a node ends when another one has said that the run has ended."""
MOVED = "the devices of the run were placed anew"


def ending(verdict: Verdict, text: str, is_master: bool, on_node_failure: str) -> Exception:
    """Return the exception that ends a phase at `verdict`; `text` says it to a person."""
    event = verdict.event
    if event in {Event.NEW_EPOCH, Event.RETURNED}:
        return EpochChanged()
    if event is Event.FINISHED:
        return NodeEnded(Exit.DONE, "the run is finished")
    if event is Event.MOVED:
        return NodeEnded(Exit.MOVED, MOVED)
    if event is Event.SUPERSEDED:
        return NodeEnded(Exit.SUPERSEDED, text)
    if event is Event.TRAINER_FAILED:
        return TrainerFailed(f"the training job failed on another node: {text}")
    if event in CODES:  # the workers hear the master alone, so it says again what one of them has said
        return NodeEnded(
            CODES[event], text, event.name.lower() if is_master and verdict.rank != MASTER else None
        )
    if is_master and failure_policy(on_node_failure).holds:
        return NodeLost(verdict.rank or 0, text, event is Event.STALLED, event is Event.LEFT)
    return NodeEnded(Exit.LOST, text, "gave_up" if is_master else "left")


class PhaseEndings:
    """Raises what has ended the present phase; for the node's main thread."""

    def __init__(self, identity: Identity, position: Position, watch: Watch, messages: Messages) -> None:
        self._identity = identity
        self._position = position
        self._watch = watch
        self._messages = messages
        self._lost: int | None = None
        """The rank that this node has said to be lost, while its phase goes on."""

    def check(self) -> None:
        """Raise what has ended the present phase, if anything has."""
        self.check_self()
        end = self.ending_of(self._watch.verdict) if self._watch.verdict is not None else None
        if self._watch.fence.tripped and not isinstance(end, NodeEnded):
            raise Fenced
        if end is not None:
            raise end
        self.say_who_is_lost()

    def ending_of(self, verdict: Verdict) -> Exception:
        """Return the exception that a verdict means for this node."""
        me = self._identity
        text = self._messages.of_verdict(verdict)
        return ending(verdict, text, me.is_master, me.settings.cluster.on_node_failure)

    def check_self(self) -> None:
        """Raise what this node itself has ended by: a signal, or an error of its watch."""
        if (number := self._watch.signal) is not None:
            stops = self._identity.leads_run and number == signal.SIGINT
            text = self._messages.interrupted(signal.Signals(number).name)
            raise NodeEnded(Exit.INTERRUPTED, text, "stopped" if stops else "left")
        if self._watch.error is not None:
            raise self._watch.error

    def check_training(self) -> None:
        """Raise as `check` does; in the training phase also where a node is lost: its job cannot go on."""
        self.check()
        if lost := self._watch.board.called(self._watch.record.epoch, "lost"):
            raise TrainerFailed(f"the job lost a peer: {self._messages.called(lost[0])}")
        if self._is_master_lost():
            raise TrainerFailed(f"the job lost a peer: {self._messages.of_rank(MASTER)}")

    def check_still_master(self) -> None:
        """Raise Ended (superseded) if another process has become the master."""
        newest, own_incarnation = self._watch.newest_record(), self._watch.incarnation
        # A record that was there at START is older than this process.
        since = newest is not None and newest.epoch > self._identity.newest_epoch
        replaced = newest is not None and since and newest.master_incarnation != own_incarnation
        if replaced or self._watch.board.highest_incarnation(MASTER) > own_incarnation:
            raise self.superseded()

    def settle(self) -> None:
        """Look once more, and raise what ends the phase anyway: it may explain an error."""
        with contextlib.suppress(SharedFsError):
            self._watch.look()
            if self._identity.is_master and self._watch.current is None:
                self.check_still_master()
            self.check()

    def superseded(self) -> NodeEnded:
        """Return the end of a process that another one has replaced."""
        newest = self._watch.newest_record()
        if newest is not None and newest.kind == "moved":
            return NodeEnded(Exit.MOVED, MOVED)
        return NodeEnded(Exit.SUPERSEDED, self._messages.superseded())

    def _is_master_lost(self) -> bool:
        if self._identity.is_master:
            return False
        watch = self._watch
        if has_left(watch.board, watch.current, MASTER):
            return True
        silent_s = watch.silence.silent_s.get(MASTER, 0.0)
        return silent_s >= self._identity.settings.cluster.node_timeout_s

    def forget_loss(self) -> int | None:
        """Return the rank that this node has said to be lost while its phase went on, which is over now."""
        lost, self._lost = self._lost, None
        return lost

    def say_who_is_lost(self) -> set[int]:
        """Say once who is lost while this phase goes on, and that they are back; returns the ranks."""
        verdict, lost = self._watch.heeded_later, None
        if verdict is not None:
            lost = verdict.rank
        elif self._is_master_lost():
            lost = MASTER
        if lost is not None and lost != self._lost:
            text = (
                self._messages.of_verdict(verdict) if verdict is not None else self._messages.master_is_lost()
            )
            log.error("%s", text)
        if self._lost is not None and lost is None:
            log.info("%s is back", self._identity.run_dir.name(self._lost))
        self._lost = lost
        return self._watch.lost
