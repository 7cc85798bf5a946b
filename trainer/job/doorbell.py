"""A FIFO that wakes a process that waits for a file of the spool. Torch-free.

It is only a hint. The file is the truth, and the waiting process looks again after a while in any case.
"""

import contextlib
import os
import select
from pathlib import Path


class Doorbell:
    """The waiting side. The FIFO is on this machine's own disk, and either side may come first."""

    def __init__(self, path: Path) -> None:
        """Make the FIFO at `path`, unless it exists."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Opened for writing too: a FIFO without a writer is always readable.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def wait(self, timeout_s: float) -> None:
        """Return once it has been rung since the last wait, or after `timeout_s`."""
        readable, _, _ = select.select([self.descriptor], [], [], timeout_s)
        if readable:
            os.read(self.descriptor, 4096)

    def close(self) -> None:
        """Stop listening."""
        os.close(self.descriptor)


def ring(path: Path) -> None:
    """Wake the process that waits at `path`, if there is one."""
    with contextlib.suppress(OSError):  # no process waits, or the FIFO is full of rings
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"\0")
        finally:
            os.close(handle)
