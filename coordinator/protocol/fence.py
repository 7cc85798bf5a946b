"""The fence: a node that does not get its own heartbeat back must not go on training.

Its mount hangs, is read-only, or is gone, so it cannot know whether the others have gone on without it. A
thread that touches no path of the shared directory notices that, and acts. A call that hangs there holds up
every other thread that makes one.
"""

import errno
import threading
from collections.abc import Callable

from coordinator.protocol.liveness import Stopwatch

LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EXDEV),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG, errno.EBADF, errno.EMFILE),
    *(errno.ENOSYS, errno.EOPNOTSUPP),
}
"""Errors that stay until somebody changes the run or the mount. What else a filesystem says (its network is
down, its disk is full) may pass.
"""


def is_away(error: OSError) -> bool:
    """Return whether the mount is in trouble that may pass, rather than this call."""
    return error.errno is not None and error.errno not in LASTING


class Fence:
    """Trips once this node's own beat has not come back for `limit_s`, and calls `act(why)` in its thread.

    A process that was stopped and wakes does not fence itself: what it then reads in the directory decides.
    """

    def __init__(self, beat_s: float, limit_s: float, act: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._beat_s = beat_s
        self._act = act
        self._away = Stopwatch(2 * beat_s)
        self._tripped = threading.Event()
        self._answers = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="fence", daemon=True)

    @property
    def tripped(self) -> bool:
        """Whether this node has to leave its epoch."""
        return self._tripped.is_set()

    def begin(self) -> None:
        """Start the guard thread."""
        self._away.restart()
        self._thread.start()

    def close(self) -> None:
        """End the guard thread."""
        self._closed.set()

    def beat_is_back(self) -> None:
        """The directory shows a beat of this node that it had not shown before."""
        self._away.restart()
        self._answers.set()

    def trip(self, why: str) -> None:
        """This node has to leave its epoch: it may come back when its next beat does."""
        self._answers.clear()
        self._tripped.set()
        self._act(why)

    def wait_until_back(self, timeout_s: float) -> bool:
        """Return whether a beat has come back since the fence tripped, within `timeout_s`."""
        return self._answers.wait(timeout_s)

    def reset(self) -> None:
        """This node has left the epoch that it was fenced in."""
        self._away.restart()
        self._tripped.clear()

    def _guard(self) -> None:
        while not self._closed.wait(min(self._beat_s, self.limit_s / 4)):
            if self._away.look() >= self.limit_s and not self.tripped:
                self.trip(f"the shared directory has not shown this node's heartbeat for {self.limit_s:g} s")
