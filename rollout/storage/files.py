"""Read, publish, list and remove files of the shared directory.

Nodes and training ranks write there through `files`, `once`, `writer` and `lines` alone. A call can fail and
work the next moment, or report an error although it succeeded; and clients remember for up to a minute what
is no longer so. Therefore:
- every call is repeated for `retry.RETRY_S` while its errno is known to pass (ESTALE, EIO, ...), then raises
  SharedFsError. An error that does not pass (EACCES, EROFS, ...) is raised at once; and so is that of a full
  disk (ENOSPC, EDQUOT), except within `retry.waiting_for_space`.
- FileNotFoundError means that a listing agrees. While a listing shows the name, the client only remembers
  that it was not there, and is asked again for up to `retry.CACHED_S`. Look up only what was listed.
- an error may be a lost reply, so the outcome decides: where the file is, or what reading it back says.
"""

import contextlib
import difflib
import errno
import logging
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from rollout.storage.retry import PASSING, PASSING_AFTER_MKDIR, SharedFsError, is_listed, retry

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

MODE = 0o660
"""The mode of a new file, less the umask."""

FEW = 4
"""Files that are read one after the other: threads would cost more than they save."""
READERS = 32

operations: Counter[str] = Counter()
"""Metadata operations of this process by name: list, open, rename, link, remove, mkdir."""


def listing(directory: Path) -> list[str]:
    """Return the names in `directory`; raises FileNotFoundError if it is not there."""
    operations["list"] += 1
    return retry("list", directory, lambda: os.listdir(directory), directory)


def named_like(path: Path) -> str:
    """Return `; did you mean FILE?` with what is beside `path` and is spelled most like it, else nothing."""
    neighbours = listing(path.parent) if is_directory(path.parent) else []
    near = difflib.get_close_matches(path.name, neighbours, n=1, cutoff=0.8)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def read(path: Path, *, fleeting: bool = False) -> bytes:
    """Return the whole file; raises FileNotFoundError if it is gone (`fleeting`: though an old listing shows
    it).
    """
    operations["open"] += 1
    return retry("read", path, path.read_bytes, None if fleeting else path)


def read_from(path: Path, start: int) -> bytes:
    """Return the file from byte `start` to its end; raises FileNotFoundError if it is gone."""
    operations["open"] += 1

    def read_on() -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read()

    return retry("read", path, read_on, path)


def content(path: Path) -> bytes | None:
    """Return the whole file; None if it is not there."""
    try:
        return read(path)
    except FileNotFoundError:
        return None


def publish(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `path` hold `data`, whole or not at all; `durable=False` leaves out all fsyncs (flags, beats)."""
    temp = write_temporary(path, data, durable)
    operations["rename"] += 1
    try:
        retry("rename to", path, lambda: os.replace(temp, path), temp)
    except OSError as error:
        drop(temp)
        if content(path) != data:
            raise SharedFsError("rename to", path, error, 0.0) from error
    if durable:
        fsync_directory(path.parent)


def show(path: Path, data: bytes) -> None:
    """Write a new file in place, for readers who know that they may see a part of it (heartbeats)."""
    operations["open"] += 1
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    retry("write", path, lambda: _fill(os.open(path, flags, MODE), data, False), path.parent)


def mark(path: Path) -> None:
    """Create an empty file, of which the name says all; one that is there stays as it is."""
    operations["open"] += 1
    flags = os.O_WRONLY | os.O_CREAT
    retry("create", path, lambda: os.close(os.open(path, flags, MODE)), path.parent, PASSING_AFTER_MKDIR)


def remove(path: Path) -> None:
    """Remove a file; one that is not there is fine."""
    operations["remove"] += 1
    with contextlib.suppress(FileNotFoundError):
        retry("remove", path, lambda: os.unlink(path), path)


def remove_tree(directory: Path) -> None:
    """Remove a directory with all below it; one that is not there is fine.

    Of a symbolic link only the link goes: a user may have moved a checkpoint away and left a link to it. What
    cannot be removed (`.nfs*` files, which another client holds open; EBUSY) stays, with a warning.
    """
    try:
        facts = retry("look at", directory, lambda: os.lstat(directory), directory)
        if stat.S_ISLNK(facts.st_mode):
            remove(directory)
            return
        for name, is_directory in _entries(directory):
            if is_directory:
                remove_tree(directory / name)
            elif not name.startswith(".nfs"):
                remove(directory / name)
        operations["remove"] += 1
        retry("remove", directory, lambda: os.rmdir(directory), directory)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s is left for the next time: %s", directory, error)


def remove_any(path: Path) -> None:
    """Remove a file, or a directory with all below it."""
    is_directory = dict(_entries(path.parent)).get(path.name, False)
    (remove_tree if is_directory else remove)(path)


def make_directory(path: Path) -> None:
    """Make `path` and its parents; two clients making one directory at once is fine. It does not look first:
    most are not there, and a client remembers that.
    """
    operations["mkdir"] += 1

    def make() -> None:
        try:
            os.mkdir(path, 0o770)
        except FileNotFoundError:
            if path.parent == path or is_directory(path.parent):
                raise  # a client may deny for a moment what is there
            make_directory(path.parent)
            os.mkdir(path, 0o770)
        except OSError as error:  # a server may say of one that is there that nobody may make it
            if is_directory(path):
                return
            is_there = None
            if isinstance(error, FileExistsError):  # its listing knows what a client may not see yet
                is_there = dict(_entries(path.parent)).get(path.name)
            if is_there is None:
                raise
            if not is_there:
                raise NotADirectoryError(errno.ENOTDIR, "a file of this name is there") from None

    retry("make the directory", path, make, path.parent, PASSING | {errno.ENOENT, errno.EEXIST})


def rename(source: Path, target: Path, *, durable: bool = True) -> None:
    """Rename a file or directory that others read by its new name; `target` may not exist as a directory."""
    operations["rename"] += 1
    try:
        retry("rename to", target, lambda: os.rename(source, target), source)
    except FileNotFoundError:
        if not is_listed(target):
            raise
    if durable:
        fsync_directory(target.parent)


def side_by_side(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `call(item)` of each item, many at a time: what takes the time is the way to the server."""
    if len(items) < FEW:
        return [call(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(READERS, len(items))) as pool:
        return list(pool.map(call, items))


def exists(path: Path) -> bool:
    """Return whether `path` is there. Unlike os.path.exists it takes no passing error for a no, nor a no
    that a listing denies.
    """
    return _mode(path) != 0


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory, or a link to one; as `exists`."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Return the st_mode of what `path` leads to; 0 if it leads to nothing that this user may find."""

    def look() -> int:
        try:
            return os.stat(path).st_mode
        except (NotADirectoryError, PermissionError):
            return 0

    try:
        return retry("look at", path, look)
    except FileNotFoundError:
        leads_to = Path(os.path.realpath(path))  # not `path`: a link is listed where it leads to nothing
    try:
        return retry("look at", path, look, leads_to)
    except FileNotFoundError:
        return 0


def file_names(directory: Path) -> list[str]:
    """Return the sorted names of the regular files directly in the directory, and of links to such."""
    return sorted(name for name, is_file in _scan(directory, lambda entry: entry.is_file()) if is_file)


def folder_names(directory: Path) -> list[str]:
    """Return the sorted names of the directories directly in the directory, without links to such."""
    return sorted(name for name, is_folder in _entries(directory) if is_folder)


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable, where the filesystem can (some report EINVAL)."""

    def sync() -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
                raise
        finally:
            os.close(descriptor)

    retry("fsync", directory, sync, directory)


def is_temporary(name: str) -> bool:
    """Return whether `name` is a temporary one: of a file not yet published, or by which creators agreed."""
    return name.startswith(".") and name.endswith(".tmp")


def published_name(name: str) -> str:
    """Return `x` for `x`, and for its temporary name."""
    return name[1:].rsplit(".", 2)[0] if is_temporary(name) else name


def temporary_name(path: Path) -> Path:
    """Return a new name beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_temporary(path: Path, data: bytes, durable: bool = True) -> Path:
    """Write `data` under a temporary name beside `path`, to be renamed or dropped."""
    temp = temporary_name(path)
    operations["open"] += 1

    def write() -> None:
        _fill(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE), data, durable)

    try:
        retry("write", path, write, path.parent, PASSING_AFTER_MKDIR)
    except BaseException:
        drop(temp)
        raise
    return temp


def _entries(directory: Path) -> list[tuple[str, bool]]:
    """(name, whether it is a directory) of each entry; FileNotFoundError if `directory` is not there."""
    return _scan(directory, lambda entry: entry.is_dir(follow_symlinks=False))


def _scan(directory: Path, test: Callable[[os.DirEntry[str]], bool]) -> list[tuple[str, bool]]:
    operations["list"] += 1
    entries = retry("list", directory, lambda: list(os.scandir(directory)), directory)
    return [(entry.name, retry("look at", directory / entry.name, partial(test, entry))) for entry in entries]


def _fill(descriptor: int, data: bytes, durable: bool) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Try to remove a file: for temporaries and old beats, which do no harm if they stay."""
    operations["remove"] += 1
    for _attempt in range(3):
        with contextlib.suppress(OSError):
            os.unlink(path)
            return
