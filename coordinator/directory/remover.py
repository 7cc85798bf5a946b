"""Remove renamed directories in a thread beside the run: filesystems are slow to remove a large file."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from coordinator.directory.background import Background
from rollout.storage import files

log = logging.getLogger(__name__)

POLL_S = 0.1
WAIT_S = 300.0
"""How long one removal may hold up the run."""
CLOSE_TIMEOUT_S = 10.0


class Remover:
    """Removes directories, one after the other."""

    def __init__(self) -> None:
        self._background = Background("remover")
        self._directories: Sequence[Path] = ()
        self._deadline_s = 0.0
        self._is_said = False

    def remove(self, directories: Sequence[Path], check: Callable[[], None]) -> None:
        """Wait until the earlier directories are gone, then begin to remove these. So a slow filesystem slows
        the run down, and does not fill up. `check` is called while it waits, and may raise.

        A removal that hangs for WAIT_S is not waited for any more. These directories then stay for a later
        call, which names them again.
        """
        while not self._background.is_idle(POLL_S):
            check()
            if time.monotonic() >= self._deadline_s:
                if not self._is_said:
                    text = "%s was not removed within %g s: the run goes on, and its disk may fill up"
                    log.warning(text, ", ".join(map(str, self._directories)), WAIT_S)
                self._is_said = True
                return
        if directories:
            self._directories, self._is_said = directories, False
            self._deadline_s = time.monotonic() + WAIT_S
            self._background.begin(partial(_remove, directories))

    def close(self) -> None:
        """Wait at most CLOSE_TIMEOUT_S until they are gone."""
        if not self._background.is_idle(CLOSE_TIMEOUT_S):
            log.warning(
                "%s was not removed within %g s; what is left of it goes when the run goes on, or with rm -r",
                ", ".join(map(str, self._directories)),
                CLOSE_TIMEOUT_S,
            )


def _remove(directories: Sequence[Path]) -> None:
    for directory in directories:
        files.remove_tree(directory)
