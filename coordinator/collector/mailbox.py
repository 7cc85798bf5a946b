"""Messages between a node and its collector, on this machine's own disk.

    collector-3/order_000007       the node's messages: the first line is the order, then what belongs to it
    collector-3/report_000007      the collector's messages about that order
    collector-3/bell.node          a FIFO that wakes the node
    collector-3/bell.collector     a FIFO that wakes the collector

Each message is one line of JSON. Each file has one writer, which appends. The files of an order are removed
with the last but one order after it, so that a run of many iterations keeps the disk small. A bell is only a
hint: both sides look again after a while.
"""

import os
import threading
from collections.abc import Mapping
from json import dumps, loads  # code of the user's may set others in the module
from pathlib import Path
from typing import Any

from trainer.job.doorbell import ring

NODE_BELL, COLLECTOR_BELL = "bell.node", "bell.collector"


class Mailbox:
    """One side's view of the messages about one order. `send` is for any thread."""

    def __init__(self, outgoing: Path, incoming: Path, bell: Path) -> None:
        """`bell` wakes the other side."""
        self._outgoing = outgoing
        self._incoming = incoming
        self._bell = bell
        self._offset = 0
        self._lock = threading.Lock()

    @classmethod
    def of_node(cls, spool: Path, number: int) -> "Mailbox":
        """Return the node's side for an order. The collector may still read the one before."""
        for path in (order_path(spool, number - 2), _report_path(spool, number - 2)):
            path.unlink(missing_ok=True)
        return cls(order_path(spool, number), _report_path(spool, number), spool / COLLECTOR_BELL)

    @classmethod
    def of_collector(cls, spool: Path, number: int) -> "Mailbox":
        """Return the collector's side for an order."""
        return cls(_report_path(spool, number), order_path(spool, number), spool / NODE_BELL)

    def send(self, message: Mapping[str, Any]) -> None:
        """Append a message, and wake the other side."""
        # Opened for each message: user code in the collector may close every descriptor of its process.
        with self._lock, self._outgoing.open("ab", buffering=0) as file:
            file.write(dumps(message).encode() + b"\n")
        ring(self._bell)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call. Raises FileNotFoundError if the spool is
        gone.
        """
        try:
            with self._incoming.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # nothing was sent yet
            os.stat(self._incoming.parent)
            return []
        lines = data[: data.rfind(b"\n") + 1]  # the writer may be in the middle of a line
        self._offset += len(lines)
        return [loads(line) for line in lines.splitlines()]


def order_path(spool: Path, number: int) -> Path:
    """Return where an order is; that it is there tells the collector to take it up."""
    return spool / f"order_{number:06d}"


def _report_path(spool: Path, number: int) -> Path:
    return spool / f"report_{number:06d}"
