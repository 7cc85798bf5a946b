"""Appends lines to a file of the shared directory, which may hang: one thread alone touches the file."""

import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

QUEUE_LINES = 10_000
"""Lines that wait for the file. When a hung mount has let so many pile up, further ones are dropped."""
BATCH_LINES = 1_000
"""Lines that are written at once, at most."""


class LineWriter:
    """Appends lines to a file in a thread of its own; `put` never blocks."""

    def __init__(self, path: Path, linger_s: float = 0.0, warns: bool = True) -> None:
        """`linger_s`: how long a line may wait for others, to be written together; `warns`: log it when the
        file cannot be written, which a node's own files leave to what fails beside them.
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
        """Lines that did not get into the file."""
        return self._overflowed + self._failed

    def put(self, line: bytes) -> None:
        """Queue a line with its newline; drop it if the file has fallen too far behind. For one thread."""
        if self._lines.qsize() < QUEUE_LINES:
            self._lines.put(line)
        else:
            self._overflowed += 1

    def end(self) -> None:
        """No more lines will come."""
        self._ended.set()
        self._lines.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until all is written; False if that took too long."""
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
            # Lines are dropped behind those that wait, so the note about them comes when none waits.
            missing = self.dropped - reported if self._lines.empty() else 0
            note = b"[%d lines are missing here: the file system did not take them]\n" % missing
            try:
                file = file or self._path.open("ab", buffering=0)
                left = memoryview((b"\n" if torn else b"") + b"".join(lines) + (note if missing else b""))
                while left:
                    left = left[file.write(left) :]
                reported, torn = reported + missing, False
            except OSError as error:  # ESTALE and the like pass: the next batch opens the file anew
                if self._warns and not self._failed:
                    logger.warning("cannot write %s: %s; dropping its lines meanwhile", self._path, error)
                self._failed += len(lines)
                torn = file is not None
                _close(file)
                file = None
        _close(file)


def _close(file: BinaryIO | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):  # what could not be written has been counted
            file.close()
