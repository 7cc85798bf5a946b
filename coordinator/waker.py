"""File events as a hint to look: the listing is the truth, and another machine's writes raise none."""

import threading
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler

from coordinator.epochs import MASTER
from coordinator.run_dir import Beat, Flag, parse_protocol_name


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
