"""Output that holds up nobody: a terminal that was stopped with Ctrl+S, a full pipe, a reader that is gone.

A thread writes what a node prints. Lines that nobody takes are dropped once there are many; the node's log
file in the run directory has them all.
"""

import atexit
import io
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TextIO

KEPT_TEXTS = 10_000
"""So many pieces of text wait for the reader; later ones are dropped."""
END_S = 2.0
"""How long the end of this process waits for a reader that takes nothing."""


def repair_streams() -> None:
    """Open the standard streams that were closed when this process was started: what it opens next would take
    their numbers, and what it prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def hold_up_nobody() -> None:
    """From here on let threads write the standard output and the standard error of this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, PatientStream(stream))


class PatientStream(io.TextIOBase):
    """A stream in front of another one, which a thread writes as its reader takes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._number = stream.fileno()
        self._texts: deque[str] = deque()
        self._changed = threading.Condition(threading.RLock())  # a signal handler may print, too
        self._is_gone = False
        self._written_s = time.monotonic()
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="output", daemon=True).start()
        atexit.register(self.drain)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream's encoding."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What a character becomes that the encoding lacks."""
        return "backslashreplace"

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._number

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Take a text to be written; drop it if the reader is gone, or far behind."""
        with self._changed:
            if not self._is_gone and len(self._texts) < KEPT_TEXTS:
                if self._pid != os.getpid():  # a fork: it has no such thread
                    self._put(text.encode(self.encoding, self.errors))
                else:
                    self._texts.append(text)
                    self._changed.notify_all()
        return len(text)

    def drain(self) -> None:
        """Wait until everything is written, END_S without progress at most."""
        self._written_s = time.monotonic()
        with self._changed:
            while self._texts and self._pid == os.getpid() and time.monotonic() - self._written_s < END_S:
                self._changed.wait(0.05)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                count = len(self._texts)
                data = "".join(self._texts).encode(self.encoding, self.errors)
            self._put(data)
            with self._changed:
                for _ in range(count):
                    self._texts.popleft()
                self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        while data and not self._is_gone:
            try:
                data = data[os.write(self._number, data) :]
                self._written_s = time.monotonic()
            except BlockingIOError:
                select.select([], [self._number], [], 1.0)
            except OSError:  # the reader has gone, or its disk is full
                self._is_gone = True
