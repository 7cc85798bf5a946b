"""What a node does for its collector while that works, and what it takes in of the collector's messages."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.collector.mailbox import Mailbox
from coordinator.collector.order import error_of
from coordinator.collector.rest_of_order import OrderProgress
from rollout.engines.answers import EngineError
from rollout.storage.retry import SharedFsError


class Stop(Protocol):
    """A threading.Event, for those who only look."""

    def is_set(self) -> bool:
        """Return whether something has ended the phase."""
        ...


@dataclass(frozen=True)
class Listener:
    """What the node does for its collector while that works."""

    stop: Stop
    """Set when something has ended the phase."""
    slots: Callable[[Sequence[int]], list[dict[str, Any]]]
    """What slots are: number, task, seed and kind of each."""
    verify: Callable[[], None]
    """Raises EngineError if the engine answers with another policy than the phase's."""
    is_engine_lost: Callable[[], None]
    """Raises what has failed in looking after the engine."""
    reach: Callable[[int, int, int], None]
    """Hears the groups made, the groups expected, and the tokens."""
    step: Callable[[], None]
    """Hears that the phase gets on."""
    full: Callable[[SharedFsError], None]
    """Hears that the collector waits for free space; may raise."""
    claimed: Callable[[Path], None]
    """Hears of a file that is to be removed when the phase is over."""
    waited: Callable[[float], None]
    """Hears for how many seconds this node had nothing to make."""
    check_self: Callable[[], None]
    """Raises what this node itself has ended by."""
    others_are_done: Callable[[], bool]
    """Whether all other nodes have made their shares of the phase."""
    lost: Callable[[], set[int]]
    """The ranks that are lost, although the phase goes on."""
    guests: Callable[[], dict[int, int]] = dict[int, int]
    """The guests that are there, and the incarnation of each."""


def _log(level: int, name: str, text: str, event: dict[str, Any] | None) -> None:
    """Log a line of the collector as the node's own."""
    logging.getLogger(name).log(level, "%s", text, extra={"event": event} if event else None)


def take_in(message: dict[str, Any], work: OrderProgress | None, listener: Listener, box: Mailbox) -> None:
    """Take in a message of the collector, and answer it if it asks. `work`: what is known of the order that
    it is about; None: that is over.
    """
    match message:
        case {"log": line}:
            _log(*line)
        case {"ask": question, "about": argument, "number": number}:
            _answer(question, argument, number, work, listener, box)
        case {"full": error}:
            full = error_of(error)
            assert isinstance(full, SharedFsError)
            listener.full(full)
        case {"claimed": path}:
            listener.claimed(Path(path))
        case {"waited_s": seconds}:
            listener.waited(seconds)
        case {"steps": steps} if steps:
            listener.step()
        case {"begun": slot} if work is not None:
            work.begun.add(slot)
        case {"alone": slot} if work is not None:
            work.alone = slot
        case {"reached": [groups, total, tokens], "made": slot} if work is not None:
            work.begun.discard(slot)
            work.reached = (groups, tokens)
            listener.reach(work.before[0] + groups, work.before[0] + total, work.before[1] + tokens)
        case {"durable": slots, "counted": counted} if work is not None:
            work.durable |= set(slots)
            work.counted += counted
        case _:
            pass


def _answer(
    question: str, argument: Any, number: int, work: OrderProgress | None, listener: Listener, box: Mailbox
) -> None:
    if question == "slots":
        if work is not None:
            work.given_out |= set(argument)
        box.send({"answer": number, "value": listener.slots(argument)})
        return

    def verify() -> None:
        refused: str | None = None
        try:
            listener.verify()
        except EngineError as error:
            refused = str(error)
        box.send({"answer": number, "value": refused})

    # In a thread: an engine that hangs must not keep this node from hearing what ends its phase.
    threading.Thread(target=verify, name="verify", daemon=True).start()


def pass_on(messages: Sequence[dict[str, Any]]) -> None:
    """Log what the collector says, of which nothing else counts any more."""
    for message in messages:
        if "log" in message:
            _log(*message["log"])
