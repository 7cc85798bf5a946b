"""The only low-level code for files of the shared directory: publish, create once, read, list, remove.

A call on a shared filesystem can fail and work the next moment, can report an error although it succeeded,
and clients remember for up to a minute what is no longer so. Therefore:
- every call is repeated within `retry.RETRY_S` while its errno is known to pass (ESTALE, EIO, ...), then
  `SharedFsError` tells. Errors that do not pass (ENOSPC, EACCES, EROFS, ...) raise at once.
- FileNotFoundError means that a listing agrees. While one shows the name, the client only remembers that it
  was not there, and is asked again for up to `retry.CACHED_S`. Look up only what a listing has shown.
- an error may be a lost reply, so the outcome decides: where the file is, what reading it back says.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from rollout.storage.retry import PASSING, SharedFsError, is_listed, retry

log = logging.getLogger(__name__)

TORN_S = 2.0
"""How long a file that is created once may stay torn before it is taken for one that nobody finishes."""
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
"""What os.link says where the filesystem has no hard links."""

operations: Counter[str] = Counter()
"""Metadata operations of this process by name: list, open, rename, link, remove, mkdir."""


def listing(directory: Path) -> list[str]:
    """The names in `directory`; FileNotFoundError if it is not there."""
    operations["list"] += 1
    return retry("list", directory, lambda: os.listdir(directory), directory)


def read(path: Path, *, fleeting: bool = False) -> bytes:
    """The whole file; FileNotFoundError if it is gone (`fleeting`: though an old listing may show it)."""
    operations["open"] += 1
    return retry("read", path, path.read_bytes, None if fleeting else path)


def publish(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `path` hold `data`, whole or not at all: temp name, write, fsync, rename, fsync of the directory.

    `durable=False` leaves out both fsyncs, for flags and beats.
    """
    temp = _write_temp(path, data, durable)
    operations["rename"] += 1
    try:
        retry("rename to", path, lambda: os.replace(temp, path), temp)
    except OSError as error:
        drop(temp)
        if _content(path) != data:
            raise SharedFsError("rename to", path, error, 0.0) from error
    if durable:
        fsync_directory(path.parent)


def create_once(path: Path, data: bytes, *, durable: bool = True) -> bool:
    """Create `path` with `data` (not empty) unless it exists; True if it now holds exactly `data`.

    By a hard link, which shows the file whole; where there are none by O_EXCL, which leaves it torn if its
    creator dies at it, or never learns that it has created it. A torn file (empty, or a JSON object that
    does not parse) is set aside after `TORN_S`, and the name created anew. Its creator, should it wake,
    writes into what was set aside, and learns from reading back that it has lost. What remains: without hard
    links, a file that is finished just then is put back, and might replace a third one's; and where O_EXCL
    does not hold between clients, there is no winner at all.
    """
    for _attempt in range(20):
        _create(path, data, durable)
        content = _settled(path)
        if content == data or content is None or not _is_torn(content):
            return content == data
        _set_aside(path)
    raise SharedFsError("create", path, OSError(errno.EIO, "it is torn each time"), 20 * TORN_S)


def remove(path: Path) -> None:
    """Remove a file; one that is not there is fine."""
    operations["remove"] += 1
    with contextlib.suppress(FileNotFoundError):
        retry("remove", path, lambda: os.unlink(path), path)


def remove_tree(directory: Path) -> None:
    """Remove a directory with all below it; one that is not there is fine.

    What does not go (`.nfs*` files, which another client holds open; EBUSY; ...) stays for the next time,
    with a warning.
    """
    try:
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


def make_directory(path: Path) -> None:
    """Make `path` and its parents; two clients making one directory at once is fine."""
    if retry("look for", path, path.is_dir):
        return
    if path.parent != path:
        make_directory(path.parent)
    operations["mkdir"] += 1

    def make() -> None:
        try:
            os.mkdir(path, 0o770)
        except FileExistsError:  # its listing knows what a client may not see yet
            is_directory = dict(_entries(path.parent)).get(path.name)
            if is_directory is None:
                raise
            if not is_directory:
                raise NotADirectoryError(errno.ENOTDIR, "a file of this name is there") from None

    retry("make the directory", path, make, path.parent, PASSING | {errno.ENOENT, errno.EEXIST})


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory that others read by its new name; `target` may not exist as a directory."""
    operations["rename"] += 1
    try:
        retry("rename to", target, lambda: os.rename(source, target), source)
    except FileNotFoundError:
        if not is_listed(target):
            raise
    fsync_directory(target.parent)


def append_line(path: Path, line: str) -> None:
    """Append `line`, durably and once; a torn last line (of a crash) is closed first."""
    operations["open"] += 1
    data = line.encode() + b"\n"
    attempts = 0

    def append() -> None:
        nonlocal attempts
        attempts += 1
        with open(path, "ab+", buffering=0) as file:  # a buffer would be written again by close
            file.seek(max(0, file.tell() - len(data)))
            end = file.read()
            if attempts > 1 and end == data:  # the attempt before was written, and only said that it failed
                left = b""
            else:
                left = data if not end or end.endswith(b"\n") else b"\n" + data
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    retry("append to", path, append, path.parent, PASSING | {errno.ENOENT})


class FileFacts(TypedDict):
    """What tells whether a file is the one that was written."""

    bytes: int
    sha256: str


def file_facts(path: Path) -> FileFacts:
    """The size and the sha256 of a file."""

    def facts() -> FileFacts:
        with open(path, "rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}

    return retry("read", path, facts, path)


def checksums(directory: Path) -> dict[str, FileFacts]:
    """Name -> size and sha256 of every regular file directly in the directory, hashed in threads."""
    paths = [
        directory / name for name, is_directory in sorted(_entries(directory, links=True)) if not is_directory
    ]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return {path.name: found for path, found in zip(paths, pool.map(file_facts, paths), strict=True)}


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

    retry("fsync", directory, sync, directory)


def is_temporary(name: str) -> bool:
    """Whether `name` is one of our unpublished temporaries, or a torn file that was set aside."""
    return name.startswith(".") and name.endswith(".tmp")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _write_temp(path: Path, data: bytes, durable: bool) -> Path:
    temp = _temporary(path)
    operations["open"] += 1

    def write() -> None:
        _fill(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o660), data, durable)

    try:  # ENOENT just after the directory was made by another client passes
        retry("write", path, write, path.parent, PASSING | {errno.ENOENT})
    except OSError:
        drop(temp)
        raise
    return temp


def _create(path: Path, data: bytes, durable: bool) -> None:
    """Try to be the one who creates `path`; what came of it is to be read back."""
    temp = _write_temp(path, data, durable)
    operations["link"] += 1
    try:
        retry("link", path, lambda: os.link(temp, path), temp)
    except FileExistsError:
        pass
    except SharedFsError as error:
        if error.errno not in NO_LINKS:
            raise
        _create_exclusively(path, data, durable)
    finally:
        drop(temp)
    if durable:
        fsync_directory(path.parent)


def _create_exclusively(path: Path, data: bytes, durable: bool) -> None:
    operations["open"] += 1

    def create() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
        try:
            _fill(descriptor, data, durable)
        except OSError:
            drop(path)  # so that the next attempt need not wait for it to settle
            raise

    with contextlib.suppress(FileExistsError):
        retry("create", path, create, path.parent)


def _settled(path: Path) -> bytes | None:
    """The content once it is whole, or after `TORN_S` as it is; None if the file is gone."""
    deadline_s = time.monotonic() + TORN_S
    while (content := _content(path)) is not None and _is_torn(content) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return content


def _is_torn(content: bytes) -> bool:
    if not content.startswith(b"{"):
        return not content
    try:
        json.loads(content)
    except ValueError:
        return True
    return False


def _set_aside(path: Path) -> None:
    """Give a torn file another name; put it back if it turns out to be whole: its creator believes in it."""
    aside = _temporary(path)
    try:
        rename(path, aside)
    except FileNotFoundError:  # another creator was first
        return
    log.warning("%s was torn; it is set aside as %s", path, aside.name)
    content = _content(aside)
    if content is not None and not _is_torn(content) and not is_listed(path):
        rename(aside, path)


def _entries(directory: Path, links: bool = False) -> list[tuple[str, bool]]:
    """(name, whether it is a directory) of each entry; FileNotFoundError if `directory` is not there.

    `links`: a link to a directory is one too.
    """

    def scan() -> list[tuple[str, bool]]:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=links)) for entry in entries]

    operations["list"] += 1
    return retry("list", directory, scan, directory)


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


def drop(path: Path) -> None:
    """Remove a file if it goes at once: for temporaries and old beats, which harm nobody if they stay."""
    operations["remove"] += 1
    for _attempt in range(3):
        with contextlib.suppress(OSError):
            os.unlink(path)
            return
