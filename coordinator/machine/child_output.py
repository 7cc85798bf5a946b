"""The output of a child process: read from a pipe, kept for `tail`, shown, and appended to a log file.

The log file is on the shared mount, which may hang. So the child writes into a pipe. One thread of the node
empties it whatever happens, and another thread alone touches the file.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from coordinator.directory.line_writer import LineWriter

logger = logging.getLogger(__name__)

TAIL_LINES = 500
"""Lines that are kept in memory."""
LINE_BYTES = 64 * 1024
"""Longer lines are split."""


LOG_BYTES = 256 * 2**20
"""The log file of a child that prints without end has so much of it, and the disk is not full."""


class ChildOutput:
    """Reads a stream to its end in a thread of its own, whatever becomes of the log file and of `echo`."""

    def __init__(
        self, name: str, stream: IO[bytes], log: Path | None, echo: Callable[[str], None] | None
    ) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._lock = threading.Lock()
        self._log = LineWriter(log) if log else None
        arguments = (stream, echo)
        self._pump = threading.Thread(target=self._run, args=arguments, name=f"output {name}", daemon=True)
        self._pump.start()

    @property
    def dropped_lines(self) -> int:
        """Lines that did not get into the log file."""
        return self._log.dropped if self._log else 0

    def tail(self, lines: int) -> str:
        """Return the last lines, `TAIL_LINES` at most."""
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
        written = 0
        with stream:
            while raw := stream.readline(LINE_BYTES):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                with self._lock:
                    self._lines.append(line)
                if self._log and written <= LOG_BYTES:
                    written += len(raw)
                    self._log.put(raw if raw.endswith(b"\n") else raw + b"\n")
                    if written > LOG_BYTES:
                        text = f"the log of {self._name} has {written >> 20} MiB: nothing more goes there"
                        self._log.put(f"[{text}]\n".encode())
                        logger.warning("%s", text)
                try:
                    if echo:
                        echo(line)
                except (OSError, ValueError) as error:  # a closed terminal must not block the child
                    logger.warning("the output of %s is no longer shown: %s", self._name, error)
                    echo = None
        if self._log:
            self._log.end()
