"""Events of a node, each with its time, for `run report`: events/rank_0001.jsonl, one JSON object a line.

Every line has `t` (seconds of this node's monotonic clock), `n` (incarnation), `e` (epoch, 0 before the
first) and `what`. Phases are `begin` and `end` (with `work_s`; the rest of the phase was waiting for others,
and `then_s` of the work, the master's conclusion, came after that);
`process`, `epoch` and `exit` are a process's own. Engines and trainers say `engine_start`, `engine_ready`,
`reload`, `trainer_start`. Each warning or error that the node logs is an event too. Nothing here waits for
the filesystem, and nothing is fsynced: a process that is killed loses the last second.
"""

import contextlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from coordinator.directory.line_writer import LineWriter
from rollout.engines.kinds import choice
from rollout.storage import files

Say = Callable[..., None]
"""`Events.add`."""

LINGER_S = 1.0
"""Lines are written together, so often."""
PACKAGES = ("flagpost", "torch", "transformers", *choice.PACKAGES)
CLOSE_S = 2.0
"""How long the end of a process waits for its last lines to be written."""


def first_begin_s(path: Path, host: str, iteration: int) -> float | None:
    """Return the moment, by the monotonic clock of this `host`, at which a process of the rank whose events
    are in `path` first began an iteration; None if none did since the rank came here
    or since the boot, or if the file cannot be read.
    """
    begun_s, latest_host, last_s = None, "", 0.0
    try:
        lines = files.read(path).splitlines()
    except OSError:  # events are for people: the run needs none
        return None
    telling = b'"what": "process"', f'"what": "begin", "it": {iteration},'.encode()
    for line in lines:
        if not any(text in line for text in telling):  # of a long run there are a million others
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line
            event = json.loads(line)
            if event["what"] == "process":
                if event["host"] != latest_host or event["t"] < last_s:
                    begun_s = None
                latest_host = event["host"]
            elif begun_s is None:
                begun_s = float(event["t"])
            last_s = event["t"]
    return begun_s if latest_host == host and last_s <= time.monotonic() else None


class Events(logging.Handler):
    """Appends to a rank's file of events, for any thread; as a logging handler, with what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._place: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._writer: LineWriter | None = None
        self._one_by_one = threading.Lock()

    def open(self, path: Path, place: Callable[[], tuple[int, int]]) -> None:
        """Keep events from here on in `path`; `place` says the incarnation and the epoch of now."""
        self._place = place
        self._writer = LineWriter(path, linger_s=LINGER_S, warns=False)
        self._writer.put(b"\n")  # the process before may have been killed in mid-line

    def add(self, what: str, **more: Any) -> None:
        """Write down that something has happened just now."""
        writer = self._writer
        if writer is None:
            return
        incarnation, epoch = self._place()
        event = {"t": round(time.monotonic(), 4), "n": incarnation, "e": epoch, "what": what, **more}
        line = json.dumps(event).encode() + b"\n"
        with self._one_by_one:
            writer.put(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write down a warning or an error, or any record that says what it is: `extra={"event": {...}}`."""
        event: dict[str, Any] | None = getattr(record, "event", None)
        if event is not None or record.levelno >= logging.WARNING:
            self.add(**{"what": record.levelname.lower(), "text": record.getMessage(), **(event or {})})

    def end(self) -> None:
        """Take no more events; write those that came, unless the shared directory hangs."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.end()
            writer.join(CLOSE_S)


def about_this_process() -> dict[str, Any]:
    """Return the facts of a process for the report: the wall clock's time, for people, and versions."""
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return the versions that should be equal on all nodes, None for a missing package; imports none."""
    by_package: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = None
    return by_package
