"""Reading a published checkpoint back, in a thread beside the run."""

import logging
import threading
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.published import Incomplete
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)


class Verifier:
    """Verifies one checkpoint at a time. What it finds is written in the checkpoint, for the master."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path) -> None:
        """Begin with a checkpoint, unless another one is still being read: then the next one's turn comes."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_verify, args=(directory,), name="verifier", daemon=True)
            self._thread.start()


def _verify(directory: Path) -> None:
    try:
        published.verify_and_record(directory, threads=1)  # the rollout wants the other cores
    except Incomplete as error:
        if directory.name in published.names(directory.parent):
            log.error("%s: the master will set the checkpoint aside", error)
    except (SharedFsError, FileNotFoundError) as error:  # the master assigns it anew
        log.warning("%s is not verified yet: %s", directory, error)
