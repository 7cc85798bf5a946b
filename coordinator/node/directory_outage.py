"""An outage: while the shared directory does not answer, or is full, a node waits, and loses no finished
work.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.machine.filesystems import find_mount
from coordinator.node.node_wait import NodeWait
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.fence import is_away
from rollout.storage.files import SharedFsError
from rollout.storage.retry import RETRY_S, is_listed, space_wait, waiting_for_space


@dataclass
class DirectoryOutage(NodeWait):
    """Waits for the shared directory, for cluster.rejoin_timeout_s at most."""

    _full_s: tuple[float, float] = field(default=(-math.inf, -math.inf), init=False)
    """When this node first, and last, waited for free space."""
    _missed_s: float | None = field(default=None, init=False)
    """Since when the run is not listed, on a filesystem that is mounted as it was."""

    def __post_init__(self) -> None:
        self._resolved = self.identity.root.resolve()
        self._mount = find_mount(self._resolved)

    def look_for_run(self) -> None:
        """Raise Ended once it is clear that somebody has moved or removed the run directory: it is gone for
        RETRY_S. Called after a failed heartbeat, in the thread that beats: it may hang with the mount.
        """
        now_s, reason = time.monotonic(), self.absence()
        if not reason:
            self._missed_s = None
        elif self._missed_s is None:
            self._missed_s = now_s
        elif now_s - self._missed_s > RETRY_S:
            raise NodeEnded(Exit.FAILED, f"{reason}. {self.messages.repair(self.identity.rank)}")

    def is_cut_off(self) -> bool:
        """Return whether the directory does not take this node's beats just now, or is not mounted as it was:
        then any error may come of that, a missing file by whatever name its reader gives it.
        """
        return self.watch.refusal is not None or not self._is_mounted()

    def absence(self) -> str:
        """Return a message if the run directory's mount is as before, and does not list the run; else an
        empty text. A mount that is gone itself may come back, so it is waited for.
        """
        if not self._is_mounted() or is_listed(self.identity.run_dir.run_json):
            return ""
        evidence = "its filesystem is there, and has no run at that place"
        cure = "Move it back, or give its new place as --log-path"
        return f"{self.identity.root} was moved or removed: {evidence}. {cure}"

    def _is_mounted(self) -> bool:
        return find_mount(self._resolved) == self._mount

    def full(self, error: SharedFsError) -> None:
        """Hear that this node waits for free space, as it does again and again. Raises Ended when it has done
        so for cluster.rejoin_timeout_s: also if what is small finds some meanwhile, and if it was fenced.
        """
        now_s = time.monotonic()
        first_s, last_s = self._full_s
        if now_s - last_s > 2 * self.watch.fence.limit_s + RETRY_S:
            first_s = now_s
        self._full_s = first_s, now_s
        limit_s = self._cluster.rejoin_timeout_s
        path = error.path if error.path.name else self.identity.run_dir.run_json  # the collector names none
        self.position.wait_for_space(space_wait(path, limit_s))
        if now_s - first_s > limit_s:
            raise NodeEnded(Exit.LOST, f"{error}. {self.messages.repair()}")

    def wait_out(self) -> None:
        """Wait until the directory shows a beat of this node again. Raises Ended.

        A worker comes back as a new incarnation, so that the master sees that it has left. A master claims
        the next epoch.
        """
        root, is_master = self.identity.root, self.identity.is_master
        fence, heart, cluster = self.watch.fence, self.watch.heart, self._cluster
        self.position.move("fenced")
        deadline_s = time.monotonic() + cluster.rejoin_timeout_s
        while not fence.wait_until_back(cluster.beat_interval_s / 4):
            self.phase_endings.check_self()
            if is_master and not heart.was_seen and self.watch.refusal is None:
                unseen = f"{root} takes this node's heartbeats, but has shown none of them"
                text = f"{unseen} for {fence.limit_s:.0f} s, so no node could see another"
                raise NodeEnded(Exit.FAILED, f"{text}; on this machine: {self.messages.doctor_command()}")
            if time.monotonic() > deadline_s:
                why = f" ({self.watch.refusal})" if self.watch.refusal else ""
                silent = f"{root} took no heartbeat for {cluster.rejoin_timeout_s:.0f} s{why}"
                raise NodeEnded(Exit.LOST, f"{silent}. {self.messages.repair()}")
        if not is_master:
            self.watch.leave()
            if not heart.renew():
                raise self.phase_endings.superseded()
        fence.reset()

    def persist(self, write: Callable[[], None]) -> None:
        """Call `write`, again once the shared directory is back: finished work must not be lost with it."""

        def check(error: SharedFsError) -> None:
            self.phase_endings.check_self()
            self.full(error)

        cluster = self._cluster
        deadline_s = time.monotonic() + cluster.rejoin_timeout_s
        while True:
            try:
                with waiting_for_space(math.inf, check):
                    return write()
            except SharedFsError as error:
                if not is_away(error) or time.monotonic() > deadline_s:
                    raise
                self.phase_endings.check_self()
                time.sleep(cluster.poll_max_s)
