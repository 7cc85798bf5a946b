"""Repeat a call on a shared filesystem while its error is one that passes; then raise SharedFsError.

A full disk passes when somebody frees some space. Only where `waiting_for_space` says so is that waited for.
"""

import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 10.0
"""How long a call is repeated after its first error."""
PATIENT_ATTEMPTS = 2
"""Least number of attempts at a call that may itself take longer than RETRY_S (to write a large file). The
other ranks of a job wait for it meanwhile, for trainer.collective_timeout_s at most."""
SAID_AFTER_S = 5.0
"""After so long a call that is still repeated is said."""
CACHED_S = 65.0
"""How long a listed name may be denied: clients remember "no such file" for up to 60 s."""
PASSING = frozenset(
    {errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
    | {errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ESHUTDOWN}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
"""Errors of shared filesystems, and of the network below them, that may be gone at the next call."""
PASSING_AFTER_MKDIR = PASSING | {errno.ENOENT}
"""A client may deny for a moment a directory that another client has just made."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that pass when somebody frees some space."""
FULL_PAUSE_S = 2.0
WAITING = "waiting for free space"
"""Words of the line that says it."""

_OS_ERROR = re.compile(r"\(os error (\d+)\)|^(?:unable to|Error closing file) .*\((\d+)\)$")
"""How Rust writes an error of the operating system, and how torch does when it maps a file."""


class SharedFsError(OSError):
    """A call on the shared directory failed for good. The message names the call, the path, how long it was
    tried, and what to do.
    """

    def __init__(self, verb: str, path: Path, error: OSError, tried_s: float) -> None:
        hint = {
            errno.ENOSPC: "; free some space there",
            errno.EDQUOT: "; your quota there is used up: free some space",
            errno.EACCES: "; check its owner and permissions",
            errno.EROFS: "; it is mounted read-only",
        }.get(error.errno or 0, "")
        free = _free_space(path) if error.errno in FULL else ""
        duration = f" (tried for {tried_s:.1f} s)" if tried_s > 0.1 else ""
        super().__init__(error.errno, f"cannot {verb} {path}: {error.strerror}{duration}{free}{hint}")
        self.path = path

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class _SpaceWait:
    limit_s: float
    check: Callable[[SharedFsError], None]


@dataclass(frozen=True)
class DirectoryCall:
    """A call on the shared directory that has not returned."""

    verb: str
    path: Path
    began_s: float
    """The monotonic moment at which it began."""


under_way: dict[int, DirectoryCall] = {}
"""The call that each thread waits for."""


def hangs(longer_than_s: float) -> bool:
    """Return whether a call on the directory has not returned for so long: others would hang too."""
    first_s = min((call.began_s for call in list(under_way.values())), default=math.inf)
    return time.monotonic() - first_s > longer_than_s


_SPACE: ContextVar[_SpaceWait | None] = ContextVar("space", default=None)


@contextmanager
def waiting_for_space(
    limit_s: float, check: Callable[[SharedFsError], None] = lambda _error: None
) -> Iterator[None]:
    """Where the disk is full, let each call of this context wait up to `limit_s` until there is some space;
    `check` is given the error again and again meanwhile, and may raise.
    """
    token = _SPACE.set(_SpaceWait(limit_s, check))
    try:
        yield
    finally:
        _SPACE.reset(token)


def retry(
    verb: str,
    path: Path,
    call: Callable[[], T],
    needs: Path | None = None,
    passing: frozenset[int] = PASSING,
    attempts: int = 1,
) -> T:
    """Call `call`, again while its errno is in `passing`, for RETRY_S and at least `attempts` times.

    While the listing of its directory shows `needs`, an error that says that it is not there is not believed.
    FileNotFoundError and FileExistsError are raised as they are, unless `passing` has them.
    """
    thread = get_ident()
    if thread in under_way:  # a part of another call
        return _retry(verb, path, call, needs, passing, attempts)
    under_way[thread] = DirectoryCall(verb, path, time.monotonic())
    try:
        return _retry(verb, path, call, needs, passing, attempts)
    finally:
        del under_way[thread]


def _retry(
    verb: str, path: Path, call: Callable[[], T], needs: Path | None, passing: frozenset[int], attempts: int
) -> T:
    failed_s: float | None = None
    last: OSError | None = None
    pause_s, is_said = 0.001, False
    while True:
        attempts -= 1
        try:
            result = call()
            if last is not None and failed_s is not None:
                _say_it_passed(verb, path, last, time.monotonic() - failed_s)
            return result
        except OSError as error:
            last = error
            failed_s = time.monotonic() if failed_s is None else failed_s
            tried_s = time.monotonic() - failed_s
            space = _SPACE.get()
            if space is not None and error.errno in FULL and tried_s < space.limit_s:
                if not is_said:
                    free = _free_space(path)
                    until = f", {space.limit_s:.0f} s at most" if math.isfinite(space.limit_s) else ""
                    log.error("cannot %s %s: %s%s; %s%s", verb, path, error.strerror, free, WAITING, until)
                    is_said = True
                space.check(SharedFsError(verb, path, error, tried_s))
                time.sleep(min(pause_s, FULL_PAUSE_S))
                pause_s *= 2
                continue
            denied = isinstance(error, FileNotFoundError) and needs is not None and is_listed(_end_of(needs))
            limit_s = CACHED_S if denied or isinstance(error, FileExistsError) else RETRY_S
            is_over = tried_s > limit_s and attempts <= 0
            if not (denied or error.errno in passing) or is_over:
                if isinstance(error, FileNotFoundError | FileExistsError) and error.errno not in passing:
                    raise
                if isinstance(error, SharedFsError):  # of a call within this one, with all there is to say
                    raise
                raise SharedFsError(verb, path, error, tried_s) from error
            if tried_s > SAID_AFTER_S and not is_said:
                text = "cannot %s %s: %s; it is tried again, for up to %.0f s"
                log.warning(text, verb, path, error.strerror, max(limit_s, RETRY_S))
                is_said = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


@contextmanager
def library_errors() -> Iterator[None]:
    """Around a library that reads or writes files itself: raise its own errors as the OSErrors they are.

    Libraries in Rust (safetensors, tokenizers) raise exceptions of other types, or an OSError without an
    errno; the errno is in the text: "I/O error: Input/output error (os error 5)". So it is in torch's
    RuntimeError: "unable to stat the file </x>: Stale file handle (116)".
    """
    try:
        yield
    except Exception as error:  # storage knows no library's exceptions by name
        match = None if isinstance(error, OSError) and error.errno else _OS_ERROR.search(str(error))
        if match is None:
            raise
        number = int(match[1] or match[2])
        raise OSError(number, os.strerror(number)) from error


def retry_library(verb: str, path: Path, call: Callable[[], T]) -> T:
    """Retry a call of a library that reads `path` itself."""

    def attempt() -> T:
        with library_errors():
            return call()

    return retry(verb, path, attempt, path)


def _say_it_passed(verb: str, path: Path, error: OSError, seconds: float) -> None:
    event = {"what": "retry", "seconds": round(seconds, 3)}
    log.debug(
        "cannot %s %s: %s; it passed after %.1f s",
        verb,
        path,
        error.strerror,
        seconds,
        extra={"event": event},
    )


def _end_of(link: Path) -> Path:
    """Return where a link leads: it is listed itself, although that may not be there."""
    return Path(os.path.realpath(link))


def is_listed(path: Path) -> bool:
    """Return whether the listing of its directory shows `path`; listing makes a client ask the
    server anew.
    """
    if path.parent == path:
        return True
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return is_listed(path.parent)
    except OSError as error:
        return error.errno in PASSING


def space_wait(path: Path, limit_s: float) -> str:
    """Return what a process does that waits up to `limit_s` for space to write `path`: `waiting for free
    space on /shared (0 of 12 MB free: free some there; it gives up after 300 s)`.
    """
    mount = os.path.realpath(path.parent)
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    free = _free_space(path).strip(" ()")
    return f"{WAITING} on {mount} ({free}: free some there; it gives up after {limit_s:.0f} s)"


def _free_space(path: Path) -> str:
    try:
        usage = shutil.disk_usage(path.parent)
    except OSError:
        return ""
    unit, size, digits = ("GB", 1e9, 1) if usage.total >= 1e9 else ("MB", 1e6, 0)
    return f" ({usage.free / size:.{digits}f} of {usage.total / size:.{digits}f} {unit} free)"
