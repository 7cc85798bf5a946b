"""Fetching the policy that samples the next iteration to this machine, in a thread beside the run."""

import logging
import threading
from functools import partial

from coordinator.directory import published
from coordinator.directory.background import Background
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.machine.copy_entries import StoreError
from coordinator.node.policies import Policies
from rollout.environment_variables import cores
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)

THREADS = max(1, min(8, cores() // 4))
"""The rollout wants the other cores."""
CLOSE_TIMEOUT_S = 2.0


class _Stopped(Exception):
    """Nobody wants the policy any more."""


class Prefetch:
    """Fetches one policy at a time. A phase that needs it sooner waits for the copy, and reads nothing twice;
    whatever goes wrong here, the phase meets it itself and acts on it.
    """

    def __init__(self, run_dir: RunDir, policies: Policies) -> None:
        self._run_dir = run_dir
        self._policies = policies
        self._wanted = 0
        self._stop = threading.Event()
        self._background = Background("prefetch")

    def begin(self, iteration: int, pause_s: float) -> None:
        """Fetch the checkpoint of `iteration`, once it is published, unless that was begun before; give up
        what was begun. `pause_s`: between two looks whether it is published.
        """
        if iteration != self._wanted:
            self.stop()
            self._wanted, self._stop = iteration, threading.Event()
            self._background.begin(partial(self._run, iteration, pause_s, self._stop))

    def stop(self) -> None:
        """Give up what was begun."""
        self._wanted = 0
        self._stop.set()

    def close(self) -> None:
        """Give up what was begun, and wait a moment until nothing of it is left."""
        self.stop()
        self._background.is_idle(CLOSE_TIMEOUT_S)

    def _run(self, iteration: int, pause_s: float, stop: threading.Event) -> None:
        def count_bytes(_size: int) -> None:
            if stop.is_set():
                raise _Stopped

        try:
            while iteration not in published.checkpoints(self._run_dir):
                if stop.wait(pause_s):
                    return
            self._policies.fetch(iteration, count_bytes, THREADS)
        except _Stopped:
            return
        except (Incomplete, StoreError, SharedFsError, FileNotFoundError) as error:
            log.warning("the policy of iteration %d was not fetched ahead: %s", iteration, error)
