"""What a call on a shared filesystem may answer: which errors pass, how long they are waited for, and how
one that does not is told.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 10.0
"""How long an error that passes is waited for."""
CACHED_S = 65.0
"""How long a listed name may be denied: clients remember "no such file" for up to 60 s."""
PASSING = frozenset(
    {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOTCONN}
)
"""Errors seen on shared filesystems that were gone at the next call."""


class SharedFsError(OSError):
    """A call on the shared directory failed for good: what, which path, and for how long it was tried."""

    def __init__(self, what: str, path: Path, error: OSError, tried_s: float) -> None:
        hint = {
            errno.ENOSPC: "; free some space there, then run the same command again",
            errno.EDQUOT: "; your quota there is used up: free some space, then run the same command again",
            errno.EACCES: "; check who may write there",
            errno.EROFS: "; it is mounted read-only",
        }.get(error.errno or 0, "")
        free = _free_space(path) if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
        tried = f" (tried for {tried_s:.1f} s)" if tried_s > 0.1 else ""
        super().__init__(error.errno, f"cannot {what} {path}: {error.strerror}{tried}{free}{hint}")

    def __str__(self) -> str:
        return str(self.args[1])


def retry(
    what: str,
    path: Path,
    call: Callable[[], T],
    needs: Path | None = None,
    passing: frozenset[int] = PASSING,
) -> T:
    """`call()`, again while its errno passes; `needs` is the name whose absence is not believed while it is
    listed. FileNotFoundError and FileExistsError fly, unless they are among `passing`.
    """
    failed_s: float | None = None
    last: OSError | None = None
    pause_s = 0.001
    while True:
        try:
            result = call()
            if last is not None and failed_s is not None:
                _say_it_passed(what, path, last, time.monotonic() - failed_s)
            return result
        except OSError as error:
            last = error
            failed_s = time.monotonic() if failed_s is None else failed_s
            tried_s = time.monotonic() - failed_s
            denied = isinstance(error, FileNotFoundError) and needs is not None and is_listed(needs)
            limit_s = CACHED_S if denied or isinstance(error, FileExistsError) else RETRY_S
            if not (denied or error.errno in passing) or tried_s > limit_s:
                if isinstance(error, FileNotFoundError | FileExistsError) and error.errno not in passing:
                    raise
                raise SharedFsError(what, path, error, tried_s) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _say_it_passed(what: str, path: Path, error: OSError, seconds: float) -> None:
    event = {"what": "retry", "seconds": round(seconds, 3)}
    log.debug(
        "cannot %s %s: %s; it passed after %.1f s",
        what,
        path,
        error.strerror,
        seconds,
        extra={"event": event},
    )


def is_listed(path: Path) -> bool:
    """Whether the listing of its directory shows `path`; listing makes a client ask the server anew."""
    if path.parent == path:
        return True
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return is_listed(path.parent)
    except OSError as error:
        return error.errno in PASSING


def _free_space(path: Path) -> str:
    try:
        usage = shutil.disk_usage(path.parent)
    except OSError:
        return ""
    return f" ({usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free)"
