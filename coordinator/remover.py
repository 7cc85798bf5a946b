"""Removes beside the run what has lost its name: a filesystem takes its time over a large file."""

import threading
from collections.abc import Sequence
from pathlib import Path

from coordinator import shared_fs

CLOSE_TIMEOUT_S = 10.0


class Remover:
    """One thread at most, which ends with its directories. What it does not get to is found the next time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def remove(self, directories: Sequence[Path]) -> None:
        """Begin to remove them with all below them, once those from before are gone."""
        self.close(None)
        if directories:
            self._thread = threading.Thread(target=_remove, args=(directories,), name="remover", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float | None = CLOSE_TIMEOUT_S) -> None:
        """Wait until they are gone; a filesystem that hangs is not waited for."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None


def _remove(directories: Sequence[Path]) -> None:
    for directory in directories:
        shared_fs.remove_tree(directory)
