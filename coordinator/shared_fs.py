"""The only low-level code for files of the shared directory: publish, create once, read, list, remove.

A call on a shared filesystem can fail and work the next moment (ESTALE, EIO, ENOENT just after a mkdir), a
rename can report an error although it succeeded, a hard link may be refused. So every call is retried
within `RETRY_S` where its errno is known to pass, and raises `SharedFsError` with path, errno and how long
it tried. Errors that do not pass (ENOSPC, EACCES, EROFS, ...) raise at once. `operations` counts the
metadata operations of this process.
"""

import contextlib
import errno
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

RETRY_S = 10.0
"""How long a passing error is retried."""
PASSING = {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
"""Errors seen on shared filesystems that were gone at the next call."""
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
"""What os.link says where the filesystem has no hard links."""

operations: Counter[str] = Counter()
"""Metadata operations of this process by name: list, open, rename, link, remove, mkdir."""


class SharedFsError(OSError):
    """A call on the shared directory failed for good: what, which path, and for how long it was tried."""

    def __init__(self, what: str, path: Path, error: OSError, tried_s: float) -> None:
        hint = {
            errno.ENOSPC: "; free some space there, then run the same command again",
            errno.EDQUOT: "; your quota there is used up",
            errno.EACCES: "; check who may write there",
            errno.EROFS: "; it is mounted read-only",
        }.get(error.errno or 0, "")
        tried = f" (tried for {tried_s:.1f} s)" if tried_s > 0.1 else ""
        super().__init__(error.errno, f"cannot {what} {path}: {error.strerror}{tried}{hint}")

    def __str__(self) -> str:
        return str(self.args[1])


def _retry(what: str, path: Path, call: Callable[[], T], also: frozenset[int] = frozenset()) -> T:
    """`call()`, again while its errno passes (`also`: here these too). FileNotFoundError and
    FileExistsError fly, unless they were waited for.
    """
    started, pause_s = time.monotonic(), 0.001
    while True:
        try:
            return call()
        except OSError as error:
            tried_s = time.monotonic() - started
            if error.errno not in PASSING | also or tried_s > RETRY_S:
                if isinstance(error, FileNotFoundError | FileExistsError) and error.errno not in also:
                    raise
                raise SharedFsError(what, path, error, tried_s) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)


def listing(directory: Path) -> list[str]:
    """The names in `directory`; FileNotFoundError if it is not there."""
    operations["list"] += 1
    return _retry("list", directory, lambda: os.listdir(directory))


def read(path: Path) -> bytes:
    """The whole file; FileNotFoundError if it is gone."""
    operations["open"] += 1
    return _retry("read", path, path.read_bytes)


def publish(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `path` hold `data`, whole or not at all: temp name, write, fsync, rename, fsync of the directory.

    `durable=False` leaves out both fsyncs, for flags and beats.
    """
    temp = _write_temp(path, data, durable)
    operations["rename"] += 1
    try:
        _retry("rename to", path, lambda: os.replace(temp, path))
    except (FileNotFoundError, SharedFsError):
        # A retransmitted rename reports an error although the first one succeeded.
        _drop(temp)
        if _content(path) != data:
            raise
    if durable:
        fsync_directory(path.parent)


def create_once(path: Path, data: bytes, *, durable: bool = True) -> bool:
    """Create `path` with `data` unless it exists; True if it now holds exactly `data`.

    By a hard link, which is atomic everywhere it exists, else by O_EXCL. The truth is what reading back
    says, since a reply can be lost: a link that reports EEXIST may be our own.
    """
    temp = _write_temp(path, data, durable)
    try:
        operations["link"] += 1
        _retry("link", path, lambda: os.link(temp, path))
    except FileExistsError:
        pass
    except SharedFsError as error:
        if error.errno not in NO_LINKS:
            raise
        _create_exclusively(path, data, durable)
    finally:
        _drop(temp)
    if durable:
        fsync_directory(path.parent)
    return _content(path) == data


def remove(path: Path) -> None:
    """Remove a file; one that is not there is fine."""
    operations["remove"] += 1
    with contextlib.suppress(FileNotFoundError):
        _retry("remove", path, lambda: os.unlink(path))


def make_directory(path: Path) -> None:
    """Make `path` and its parents; two clients making one directory at once is fine."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    operations["mkdir"] += 1

    def make() -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            if path.is_file():
                raise NotADirectoryError(errno.ENOTDIR, "a file of this name is there") from None
            if not path.is_dir():  # another client has just made it, and we do not see it yet
                raise

    _retry("make the directory", path, make, also=frozenset({errno.ENOENT, errno.EEXIST}))


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory that others read by its new name; `target` may not exist as a directory."""
    operations["rename"] += 1
    try:
        _retry("rename to", target, lambda: os.rename(source, target))
    except FileNotFoundError:
        if not target.exists():
            raise
    fsync_directory(target.parent)


def append_line(path: Path, line: str) -> None:
    """Append `line`, durably; a torn last line (of a crash) is closed first, so that it spoils no other."""
    operations["open"] += 1

    def append() -> None:
        with open(path, "ab+") as file:
            torn = False
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    _retry("append to", path, append)


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable; a filesystem that cannot (EINVAL) is left alone."""

    def sync() -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
                raise
        finally:
            os.close(descriptor)

    _retry("fsync", directory, sync)


def is_temporary(name: str) -> bool:
    """Whether `name` is one of our unpublished temporaries."""
    return name.startswith(".") and name.endswith(".tmp")


def _write_temp(path: Path, data: bytes, durable: bool) -> Path:
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    operations["open"] += 1

    def write() -> None:
        # ENOENT just after the directory was made by another client passes.
        _fill(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o660), data, durable)

    try:
        _retry("write", path, write, also=frozenset({errno.ENOENT}))
    except OSError:
        _drop(temp)
        raise
    return temp


def _create_exclusively(path: Path, data: bytes, durable: bool) -> None:
    operations["open"] += 1

    def create() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
        try:
            _fill(descriptor, data, durable)
        except OSError:
            _drop(path)  # else it would stay torn for good
            raise

    with contextlib.suppress(FileExistsError):
        _retry("create", path, create)


def _fill(descriptor: int, data: bytes, durable: bool) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _content(path: Path) -> bytes | None:
    try:
        return read(path)
    except FileNotFoundError:
        return None


def _drop(path: Path) -> None:
    operations["remove"] += 1
    with contextlib.suppress(OSError):
        os.unlink(path)
