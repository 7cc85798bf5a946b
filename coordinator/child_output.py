"""The output of a child process: read from a pipe, kept for `tail`, shown, and appended to a log file.

The log lies on the shared mount, which may hang. So the child writes into a pipe, one thread of ours
empties it come what may, and another one alone touches the file.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

logger = logging.getLogger(__name__)

TAIL_LINES = 500
"""Lines that are kept in memory."""
LINE_BYTES = 64 * 1024
"""Longer lines are split."""
QUEUE_LINES = 10_000
"""Lines that wait for the log file. When a hung mount has let so many pile up, further ones are dropped."""
BATCH_LINES = 1_000
"""Lines that are written at once, at most."""


class LogWriter:
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


class Output:
    """Reads a stream to its end in a thread of its own, whatever becomes of the log file and of `echo`."""

    def __init__(
        self, name: str, stream: IO[bytes], log: Path | None, echo: Callable[[str], None] | None
    ) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._lock = threading.Lock()
        self._log = LogWriter(log) if log else None
        arguments = (stream, echo)
        self._pump = threading.Thread(target=self._run, args=arguments, name=f"output {name}", daemon=True)
        self._pump.start()

    @property
    def dropped_lines(self) -> int:
        """Lines that did not get into the log file."""
        return self._log.dropped if self._log else 0

    def tail(self, lines: int) -> str:
        """The last lines, `TAIL_LINES` at most."""
        with self._lock:
            return "\n".join(list(self._lines)[-lines:])

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the stream and until the log file has it all; warn if it is not complete."""
        deadline_s = time.monotonic() + timeout_s
        self._pump.join(timeout_s)
        written = self._log is None or self._log.join(max(0.0, deadline_s - time.monotonic()))
        if self.dropped_lines:
            logger.warning("%d lines of the log of %s were dropped", self.dropped_lines, self._name)
        elif not written:
            logger.warning("the log of %s may miss its last lines", self._name)

    def _run(self, stream: IO[bytes], echo: Callable[[str], None] | None) -> None:
        with stream:
            while raw := stream.readline(LINE_BYTES):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                with self._lock:
                    self._lines.append(line)
                if self._log:
                    self._log.put(raw if raw.endswith(b"\n") else raw + b"\n")
                try:
                    if echo:
                        echo(line)
                except (OSError, ValueError) as error:  # a closed terminal must not block the child
                    logger.warning("the output of %s is no longer shown: %s", self._name, error)
                    echo = None
        if self._log:
            self._log.end()
