"""A FIFO that wakes who waits for a file of the spool. A hint alone: the file is the truth, and who waits
looks again after a while in any case. Torch-free.
"""

import contextlib
import os
import select
from pathlib import Path


class Doorbell:
    """The side that waits. On this machine's own disk; both sides may come first."""

    def __init__(self, path: Path) -> None:
        """Make the FIFO at `path` unless it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: a FIFO that all writers have closed would be readable for ever.
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def wait(self, timeout_s: float) -> None:
        """Until it has been rung since the last wait, or `timeout_s` have passed."""
        readable, _, _ = select.select([self._handle], [], [], timeout_s)
        if readable:
            os.read(self._handle, 4096)

    def close(self) -> None:
        """Nobody hears it any more."""
        os.close(self._handle)


def ring(path: Path) -> None:
    """Wake who waits at `path`, if there is anybody."""
    with contextlib.suppress(OSError):  # nobody waits, or has been rung thousands of times
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"\0")
        finally:
            os.close(handle)
