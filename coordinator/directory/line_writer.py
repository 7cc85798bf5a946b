"""Append lines to a file of the shared directory. Only one thread uses the file, because it may hang."""

import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

QUEUE_LINES = 10_000
"""The most lines that may wait for the file, e.g. while a mount hangs; further lines are dropped."""
BATCH_LINES = 1_000
"""The most lines written at once."""


class LineWriter:
    """Appends lines to a file in a thread of its own; `put` never blocks."""

    def __init__(self, path: Path, linger_s: float = 0.0, warns: bool = True) -> None:
        """`linger_s`: how long a line may wait, to be written with later ones. `warns`: log it when the file
        cannot be written; for a node's own files other errors say so.
        """
        self._path = path
        self._linger_s = linger_s
        self._warns = warns
        self._ended = threading.Event()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._overflowed = 0
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines were not written to the file."""
        return self._overflowed + self._failed

    def put(self, line: bytes) -> None:
        """Queue a line with its newline, or drop it if too many lines wait. Only one thread may call this."""
        if self._lines.qsize() < QUEUE_LINES:
            self._lines.put(line)
        else:
            self._overflowed += 1

    def end(self) -> None:
        """Say that no more lines will come."""
        self._ended.set()
        self._lines.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until all lines are written. False if `timeout_s` has passed."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        file: BinaryIO | None = None
        reported, more, torn = 0, True, False
        while more:
            batch = [self._lines.get()]
            if self._linger_s:
                self._ended.wait(self._linger_s)
            while len(batch) < BATCH_LINES and not self._lines.empty():
                batch.append(self._lines.get())
            lines = [line for line in batch if line is not None]
            more = len(lines) == len(batch)
            # Dropped lines come after those that wait, so the note about them is written when none waits.
            missing = self.dropped - reported if self._lines.empty() else 0
            note = b"[%d lines are missing here: the file system did not take them]\n" % missing
            try:
                file = file or self._path.open("ab", buffering=0)
                block = memoryview((b"\n" if torn else b"") + b"".join(lines) + (note if missing else b""))
                while block:
                    block = block[file.write(block) :]
                reported, torn = reported + missing, False
            except OSError as error:  # ESTALE and others pass: the next batch opens the file again
                if self._warns and lines and not self._failed:
                    logger.warning("cannot write %s: %s; dropping its lines meanwhile", self._path, error)
                self._failed += len(lines)
                torn = file is not None
                _close(file)
                file = None
        _close(file)


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):  # lines that were not written have been counted
            file.close()
