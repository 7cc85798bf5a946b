"""One child process: its process groups, which end with it, and its output. `children` says why none of them
outlives the node.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from coordinator.machine import reaper
from coordinator.machine.child_output import ChildOutput
from trainer.job.launch import LAUNCHER

logger = logging.getLogger(__name__)


KILL_S = 5.0
"""How long killed processes may take to vanish before we say so and go on."""
BURY_S = 0.2
"""How long the processes of a child that has ended by itself may take to vanish, when it is polled."""
FLUSH_S = 1.0
"""How long an ended child's last output may take."""


class Child:
    """One child process, its process groups and its output. Made by `Children.start`; for any thread."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        spool: Path,
        log: Path | None,
        echo: Callable[[str], None] | None,
    ) -> None:
        self.name = name
        self.spool = spool
        self._groups = str(spool / reaper.PGID_DIR)
        self._lock = threading.Lock()
        self._buried = False
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", LAUNCHER, self._groups, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        stdout = self._process.stdout
        assert stdout is not None
        self.pid = self._process.pid
        self._output = ChildOutput(name, stdout, log, echo)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of its output; complete once `poll` or `wait` has said that it has exited."""
        return self._output.tail(lines)

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs.

        Once it has exited, what is left of its groups is killed.
        """
        if self._process.poll() is None:
            return None
        self._bury(BURY_S)
        return self._process.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its exit, `timeout_s` at most; then as `poll`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def terminate(self) -> None:
        """SIGTERM to its own group."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> bool:
        """`terminate`, then `kill` as soon as it has exited, after `grace_s` at the latest."""
        self.terminate()
        self.wait(grace_s)
        return self.kill()

    def kill(self) -> bool:
        """SIGKILL all its groups at once, wait until they are gone, and remove its spool.

        False, with a warning, if something is left after `KILL_S`: it sits in a hung mount and dies with
        the answer.
        """
        self.kill_now()
        if not self._bury(KILL_S):
            logger.warning("%s (pid %d) is killed, but not gone after %.0f s", self.name, self.pid, KILL_S)
            return False
        shutil.rmtree(self.spool, ignore_errors=True)
        return True

    def kill_now(self) -> None:
        """SIGKILL all its groups and wait for nothing."""
        if self._process.poll() is None:  # it may not have registered yet
            reaper.kill_group(self.pid)
        reaper.sweep(self._groups)

    def _bury(self, timeout_s: float) -> bool:
        """Reap it, kill and forget its groups, take in its last output. False if time was too short."""
        with self._lock:
            if self._buried:
                return True
            deadline_s, pause_s = time.monotonic() + timeout_s, 0.001
            while not (reaper.sweep(self._groups, only_zombies) and self._process.poll() is not None):
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            self._output.join(FLUSH_S)
            self._buried = True
            return True


def only_zombies(pgid: int) -> bool:
    """Return whether no process of a group is alive. Where process 1 reaps nobody, its zombies
    stay for good.
    """
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == pgid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return True
