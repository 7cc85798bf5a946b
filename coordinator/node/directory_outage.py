"""An outage: while the shared directory does not answer, or is full, a node waits, and loses no finished
work.
"""

import math
import time
from collections.abc import Callable

from coordinator.machine.filesystems import find_mount
from coordinator.node.identity import Identity
from coordinator.node.messages import Messages
from coordinator.node.phase_endings import PhaseEndings
from coordinator.node.position import Position
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.fence import is_away
from coordinator.protocol.watch import Watch
from rollout.storage.files import SharedFsError
from rollout.storage.retry import RETRY_S, is_listed, waiting_for_space


class DirectoryOutage:
    """Waits for the shared directory, for cluster.rejoin_timeout_s at most."""

    def __init__(
        self,
        identity: Identity,
        position: Position,
        watch: Watch,
        messages: Messages,
        phase_endings: PhaseEndings,
    ) -> None:
        self._identity = identity
        self._position = position
        self._watch = watch
        self._messages = messages
        self._phase_endings = phase_endings
        self._full_s = (-math.inf, -math.inf)
        """When this node first, and last, waited for free space."""
        self._resolved = identity.root.resolve()
        self._mount = find_mount(self._resolved)
        self._missed_s: float | None = None
        """Since when the run is not listed, on a filesystem that is mounted as it was."""

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
            raise NodeEnded(Exit.FAILED, f"{reason}. {self._messages.repair()}")

    def is_cut_off(self) -> bool:
        """Return whether the directory does not take this node's beats just now, or is not mounted as it was:
        then any error may come of that, a missing file by whatever name its reader gives it.
        """
        return self._watch.refusal is not None or not self._is_mounted()

    def absence(self) -> str:
        """Return a message if the run directory's mount is as before, and does not list the run; else an
        empty text. A mount that is gone itself may come back, so it is waited for.
        """
        if not self._is_mounted() or is_listed(self._identity.run_dir.run_json):
            return ""
        evidence = f"{self._mount.point} is mounted as before, and has no run there"
        cure = "Move it back, or give its new place as --log-path"
        return f"{self._identity.root} was moved or removed: {evidence}. {cure}"

    def _is_mounted(self) -> bool:
        return find_mount(self._resolved) == self._mount

    def full(self, error: SharedFsError) -> None:
        """Hear that this node waits for free space, as it does again and again. Raises Ended when it has done
        so for cluster.rejoin_timeout_s: also if what is small finds some meanwhile, and if it was fenced.
        """
        now_s = time.monotonic()
        first_s, last_s = self._full_s
        if now_s - last_s > 2 * self._watch.fence.limit_s + RETRY_S:
            first_s = now_s
        self._full_s = first_s, now_s
        if now_s - first_s > self._identity.settings.cluster.rejoin_timeout_s:
            raise NodeEnded(Exit.LOST, f"{error}. {self._messages.repair()}")

    def wait_out(self) -> None:
        """Wait until the directory shows a beat of this node again. Raises Ended.

        A worker comes back as a new incarnation, so that the master sees that it has left. A master claims
        the next epoch.
        """
        root, is_master = self._identity.root, self._identity.is_master
        fence, heart, cluster = self._watch.fence, self._watch.heart, self._identity.settings.cluster
        self._position.move("fenced")
        deadline_s = time.monotonic() + cluster.rejoin_timeout_s
        while not fence.wait_until_back(cluster.beat_interval_s / 4):
            self._phase_endings.check_self()
            if is_master and not heart.was_seen and self._watch.refusal is None:
                unseen = f"{root} takes this node's heartbeats, but has shown none of them"
                text = f"{unseen} for {fence.limit_s:.0f} s, so no node could see another"
                raise NodeEnded(Exit.FAILED, f"{text}; on this machine: {self._messages.doctor_command()}")
            if time.monotonic() > deadline_s:
                why = f" ({self._watch.refusal})" if self._watch.refusal else ""
                silent = f"{root} took no heartbeat for {cluster.rejoin_timeout_s:.0f} s{why}"
                raise NodeEnded(Exit.LOST, f"{silent}. {self._messages.repair()}")
        if not is_master:
            self._watch.leave()
            if not heart.renew():
                raise self._phase_endings.superseded()
        fence.reset()

    def persist(self, write: Callable[[], None]) -> None:
        """Call `write`, again once the shared directory is back: finished work must not be lost with it."""

        def check(error: SharedFsError) -> None:
            self._phase_endings.check_self()
            self.full(error)

        cluster = self._identity.settings.cluster
        deadline_s = time.monotonic() + cluster.rejoin_timeout_s
        while True:
            try:
                with waiting_for_space(math.inf, check):
                    return write()
            except SharedFsError as error:
                if not is_away(error) or time.monotonic() > deadline_s:
                    raise
                self._phase_endings.check_self()
                time.sleep(cluster.poll_max_s)
