"""The node's side of its collector: it is started when there is work, ordered, listened to, and ended.

A collector that ends, or whose event loop stands still, costs what it had in flight: the node starts another
one, which makes that again. If that ends too, the slots that were in flight both times are made one at a
time, and the one that ends a collector alone is given up.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.collector.echo import Echo
from coordinator.collector.listener import Listener, pass_on, take_in
from coordinator.collector.mailbox import NODE_BELL, Mailbox
from coordinator.collector.order import CollectorFailed, Order, error_of
from coordinator.collector.rest_of_order import OrderProgress
from coordinator.directory.layout import RunDir
from coordinator.journal.events import Say
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.machine.oddities import explained
from coordinator.protocol.liveness import Stopwatch
from rollout.collect import AllGivenUp, Stopped
from rollout.engines.answers import EngineError
from rollout.storage.retry import SharedFsError
from rollout.tally import amount
from trainer.job.doorbell import Doorbell

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often the node looks for messages, and at what ends the phase, while no bell rings."""
REACT_S = 10.0
"""How long a collector may take to stop beginning groups, or to give up those in flight."""
OTHERS_S = 1.0
"""How often the node looks whether it is the last one, and who is lost."""
LATE_S = 10.0
"""How much later than a group would time out a standing event loop is taken for hung."""
HANGS_S = 5.0
"""How long finished groups may take to become durable before a signal to this node goes first."""


@dataclass
class InFlight:
    """Groups that are being made, also from one epoch to the next."""

    key: str
    """What they are made with: nodes of two epochs with the same key make the same groups."""
    iteration: int
    slots: list[int]
    ahead_s: float = 0.0
    """For how long they were made before their phase."""


class _CollectorDied(Exception):
    """The collector has ended, or hangs; the message says how."""

    def __init__(self, text: str, exit_status: int | None = None) -> None:
        super().__init__(text)
        self.is_by_users_code = exit_status is not None and exit_status >= 0
        """Whether it has ended by itself: our code does not do that while it makes groups."""


class CollectorHost:
    """Starts, orders and ends the collector of this node."""

    def __init__(self, children: Children, run_dir: RunDir, rank: int, say: Say) -> None:
        self._children = children
        self._run_dir = run_dir
        self._rank = rank
        self._say = say
        self._child: Child | None = None
        self._bell: Doorbell | None = None
        self._starts = 0
        self._number = 0
        self._box: Mailbox | None = None
        self._is_working = False
        """Whether the collector does an order."""
        self.in_flight: InFlight | None = None
        """What goes on in the collector although no order is done."""

    def start(self) -> None:
        """Have a collector: it imports what it needs while the node does other things."""
        if self._child is not None and self._child.poll() is None:
            return
        spool = self._children.new_spool("collector")
        self._bell = Doorbell(spool / NODE_BELL)
        self._starts += 1
        self._number, self._is_working, self.in_flight = 0, False, None
        log_file = self._run_dir.logs(self._rank) / f"collector.{os.getpid()}.{self._starts}.log"
        argv = [sys.executable, "-P", "-m", "coordinator.collector.process", str(spool)]
        echo = Echo(log_file)
        self._child = self._children.start("collector", argv, log=log_file, echo=echo, spool=spool)

    def collect(self, order: Order, listener: Listener) -> dict[str, Any]:
        """Have the groups of an order made; returns how many are `short`, and what is `made`.

        Raises Stopped, with the rest in flight, once `listener.stop` is set. Else it raises what has failed.
        """
        work = OrderProgress(order)
        while True:
            try:
                self._give(work.order)
                return self._follow(work, listener)
            except _CollectorDied as death:
                self._is_working, self.in_flight = False, None
                if listener.stop.is_set():
                    raise Stopped(str(death)) from None
                again = len(work.begun) + len(work.order.in_flight)
                by_user = " (code of an environment or a reward has ended its process, e.g. by os._exit)"
                log.error(
                    "the collector of this node %s%s: %s begun again",
                    death,
                    by_user if again and death.is_by_users_code else "",
                    amount(again, "groups", "are"),
                )
                self._say("collector_lost", text=str(death))
                work.after_death(str(death))

    def begin(self, order: Order, listener: Listener, is_over: Callable[[], bool]) -> Exception | None:
        """Have groups made ahead until `is_over`, which may raise; they are in flight then. Returns what has
        gone wrong with them.
        """
        failed: Exception | None = None
        work = OrderProgress(order)
        try:
            self._give(order)
            while not is_over():
                if failed is None:
                    try:
                        listener.is_engine_lost()
                        if self._look(work, listener) is not None:
                            failed = CollectorFailed("the collector has ended its order")
                    except (_CollectorDied, EngineError, CollectorFailed, AllGivenUp) as error:
                        failed = (
                            error if not isinstance(error, _CollectorDied) else CollectorFailed(f"it {error}")
                        )
                self._wait(LOOK_S / 5)
        finally:
            if failed is None:
                self._pause(work, listener)
        if failed is not None:
            self.drop()
        return failed

    def leave(self) -> None:
        """Have a guest's collector claim nothing more; for any thread."""
        if (box := self._box) is not None:
            box.send({"leave": True})

    def flush(self, listener: Listener) -> None:
        """Have what is finished made durable; SharedFsError if that fails."""
        if self._box is None or self._child is None or self._child.poll() is not None:
            return
        self._box.send({"flush": True})
        waited = Stopwatch(1.0)
        while True:
            for message in self._box.receive():
                if "flushed" in message:
                    if message["flushed"] is None:
                        return
                    failure = self._failure(message["flushed"])
                    if not isinstance(failure, _CollectorDied):
                        raise failure
                    log.error("the collector of this node %s: its finished groups are made again", failure)
                    return
                take_in(message, None, listener, self._box)
            if self._child.poll() is not None:
                log.error("the collector of this node %s: its finished groups are made again", self._how())
                return
            if waited.look() > HANGS_S:
                listener.check_self()
            self._wait(LOOK_S)

    def drop(self) -> None:
        """Give up what is in flight."""
        if self._child is None or self._box is None or not (self._is_working or self.in_flight):
            return
        self._is_working, self.in_flight = False, None
        self._box.send({"pause": True})
        self._number += 1
        before, self._box = self._box, Mailbox.of_node(self._child.spool, self._number)
        self._box.send({"drop": True})
        waited = Stopwatch(1.0)
        while self._child.poll() is None and waited.look() < REACT_S:
            pass_on(before.receive())
            messages = self._box.receive()
            pass_on(messages)
            if any("ended" in message for message in messages):
                return
            self._wait(LOOK_S)
        self._child.kill()

    # ---- one order

    def _give(self, order: Order) -> None:
        self.start()
        assert self._child is not None
        self._number += 1
        self._box = Mailbox.of_node(self._child.spool, self._number)
        self._box.send({"order": order.to_json()})
        self._is_working = True

    def _follow(self, work: OrderProgress, listener: Listener) -> dict[str, Any]:
        """Listen until the order has ended; see `collect`."""
        limit_s = work.order.settings.group_timeout_s + LATE_S
        silent = Stopwatch(1.0)
        work.heard = silent.restart
        waits = work.order.settings.completion_threshold < 1
        present = (set[int](), dict[int, int]())
        looked = Stopwatch(1.0)
        while not listener.stop.is_set():
            if looked.look() > OTHERS_S:
                looked.restart()
                assert self._box is not None
                if waits and listener.others_are_done():
                    self._box.send({"others_are_done": True})
                    waits = False
                if (now_present := (listener.lost(), listener.guests())) != present:
                    present = now_present
                    self._box.send({"lost": sorted(present[0]), "guests": sorted(present[1].items())})
            if (ended := self._look(work, listener)) is not None:
                return ended
            listener.is_engine_lost()
            if silent.look() > limit_s:
                self._end_child()
                raise _CollectorDied(f"did not answer for {limit_s:.0f} s, and was killed")
            self._wait(LOOK_S)
        self._pause(work, listener)
        raise Stopped("its phase has ended")

    def _pause(self, work: OrderProgress, listener: Listener) -> None:
        """Have the collector begin no further group. One that does not react is killed."""
        assert self._box is not None
        self._box.send({"pause": True})
        waited = Stopwatch(1.0)
        while waited.look() < REACT_S:
            try:
                ended = self._look(work, listener)
            except (_CollectorDied, EngineError, SharedFsError, CollectorFailed, AllGivenUp) as error:
                log.warning("what was in flight is made again: %s", error)
                return
            if ended is not None:
                slots = ended.get("paused", [])
                self._is_working = False
                if slots:
                    self.in_flight = InFlight(
                        work.order.key, work.order.iteration, slots, ended.get("ahead_s", 0.0)
                    )
                return
            self._wait(LOOK_S)
        text = "the collector of this node did not stop for %.0f s: it is ended, its groups are made again"
        log.error(text, REACT_S)
        self._end_child()
        self._is_working = False

    def _look(self, work: OrderProgress, listener: Listener) -> dict[str, Any] | None:
        """Take in what the collector says; returns how the order has ended, if it has. Raises its error."""
        assert self._box is not None and self._child is not None
        is_dead = self._child.poll() is not None  # first: it may have said all before it ended
        for message in self._box.receive():
            work.heard()
            if "ended" in message:
                ended = message["ended"]
                if (error := ended.get("error")) is None:
                    self._is_working = "paused" in ended
                    return ended
                raise self._failure(error)
            take_in(message, work, listener, self._box)
        if is_dead:
            raise _CollectorDied(self._how(), self._child and self._child.poll())
        return None

    def _failure(self, error: dict[str, Any]) -> Exception:
        """Return the exception for an error of the collector. One that nobody expects ends its process, which
        user code may have spoiled.
        """
        failure = error_of(error)
        if error["kind"]:
            return failure
        log.error("%s", error["traceback"])
        if explained(failure) is not failure:
            return failure
        self._end_child()
        return _CollectorDied(f"has failed ({error['text']})")

    def _wait(self, seconds: float) -> None:
        assert self._bell is not None
        self._bell.wait(seconds)

    def _end_child(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child = None

    def _how(self) -> str:
        """Say how the collector has ended."""
        assert self._child is not None
        code = self._child.poll()
        last = self._child.tail(5).strip().splitlines()
        words = f"; its last line: {last[-1]}" if last else ""
        return f"ended with exit status {code}{words}"
