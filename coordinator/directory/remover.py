"""Removes beside the run what has lost its name: a filesystem takes its time over a large file."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout.storage import files

log = logging.getLogger(__name__)

POLL_S = 0.1
CLOSE_TIMEOUT_S = 10.0


class Remover:
    """One thread at most, which ends with its directories."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._directories: Sequence[Path] = ()

    def remove(self, directories: Sequence[Path], check: Callable[[], None]) -> None:
        """Begin to remove them with all below them, once those from before are gone: a filesystem that is
        slower than the run holds it up, rather than fill. `check` is called meanwhile, and may raise.
        """
        while not self._is_done(POLL_S):
            check()
        if directories:
            self._directories = directories
            self._thread = threading.Thread(target=_remove, args=(directories,), name="remover", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until they are gone, for a while."""
        if not self._is_done(CLOSE_TIMEOUT_S):
            log.warning(
                "%s was not removed within %g s; what is left of it goes when the run goes on, or with rm -r",
                ", ".join(map(str, self._directories)),
                CLOSE_TIMEOUT_S,
            )

    def _is_done(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()


def _remove(directories: Sequence[Path]) -> None:
    for directory in directories:
        files.remove_tree(directory)
