"""File events as a hint to look: the listing is the truth, and another machine's writes raise none."""

import logging
import threading
from pathlib import Path
from typing import Any

from watchdog.events import FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from coordinator.directory.layout import Beat, Flag, parse_protocol_name
from coordinator.protocol.records import MASTER

log = logging.getLogger(__name__)


def follow(directory: Path, wake: threading.Event, rank: int) -> Any | None:
    """Return the running observer whose events set `wake`; None where there are no events."""
    observer = Observer()
    try:
        observer.schedule(Waker(wake, rank), str(directory), event_filter=[FileMovedEvent])
        observer.start()
    except OSError as error:
        log.info("no file events here (%s): waiting by listing alone", error)
        return None
    return observer


class Waker(FileSystemEventHandler):
    """Wakes a waiter at the flags that it can be waiting for: a worker waits for the master's alone."""

    def __init__(self, wake: threading.Event, rank: int) -> None:
        self._wake = wake
        self._rank = rank

    def on_any_event(self, event: FileSystemEvent) -> None:
        name = Path(str(event.dest_path or event.src_path)).name
        entry = parse_protocol_name(name)
        if entry is None or isinstance(entry, Beat):
            return
        routine = isinstance(entry, Flag) and entry.kind in {"ok", "enter"} and entry.rank != MASTER
        if not routine or self._rank == MASTER:
            self._wake.set()
