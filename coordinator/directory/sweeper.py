"""Remove small files that nobody reads any more in a thread, so that no phase waits for it."""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rollout.storage import files

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class Sweeper:
    """Removes the files that it is given, one after the other. What it leaves, because the directory takes no
    removal or the process is killed, the next process of the rank removes.
    """

    def __init__(self) -> None:
        self._paths: deque[Path] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        self._is_said = False
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)
        self._thread.start()

    def sweep(self, paths: Iterable[Path]) -> None:
        """Remove these files soon."""
        self._paths.extend(paths)
        self._wake.set()

    def close(self) -> None:
        """Wait at most CLOSE_TIMEOUT_S until all are gone."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closed
            while self._paths:
                self._remove(self._paths.popleft())

    def _remove(self, path: Path) -> None:
        try:
            (files.remove_any if files.is_temporary(path.name) else files.remove)(path)
        except OSError as error:
            if not self._is_said:
                log.warning("%s stays: %s", path, error)
            self._is_said = True
