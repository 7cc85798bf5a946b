"""File events as a hint to look: the listing is the truth, and another machine's writes raise none."""

import logging
import threading
from pathlib import Path
from typing import Any

from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from coordinator.directory.file_names import Beat, parse_protocol_name

log = logging.getLogger(__name__)


def follow(directory: Path, wake: threading.Event) -> Any | None:
    """Return the running observer whose events set `wake`; None where there are no events."""
    try:
        observer = Observer()
        observer.schedule(Waker(wake), str(directory), event_filter=[FileCreatedEvent, FileMovedEvent])
        observer.start()
    except OSError as error:
        log.info("no file events here (%s): waiting by listing alone", error)
        return None
    return observer


class Waker(FileSystemEventHandler):
    """Wakes a waiter at whatever another node says, but for its heartbeats."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        name = Path(str(event.dest_path or event.src_path)).name
        if not isinstance(parse_protocol_name(name), Beat | None):
            self._wake.set()
