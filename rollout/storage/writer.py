"""Write the files of a directory: each one whole, durable and hashed, several at once in threads.

A file is given as its bytes, or as a function that writes them piece by piece. They are hashed on their way
into a temporary name; then come fsync and rename. A name itself becomes durable with the next
`files.publish` or `files.fsync_directory` in its directory.
"""

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import IO, Self

from rollout.storage import files, hashing
from rollout.storage.hashing import CHUNK_BYTES, CountBytes, FileFacts
from rollout.storage.once import NO_LINKS
from rollout.storage.retry import PASSING_AFTER_MKDIR, PATIENT_ATTEMPTS, SharedFsError, retry

THREADS = 8
WRITEBACK_BYTES = 1 << 26
"""Bytes of a durable file after which the system begins to write them, while the next are hashed. By itself a
machine with much memory begins when it is told to sync, and the processor waits meanwhile."""
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE."""
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""The C library's function, which Linux alone has."""


class FileSink:
    """Takes the bytes of one file, in order, and hashes them."""

    def __init__(self, file: IO[bytes], count_bytes: CountBytes, durable: bool = False) -> None:
        """`count_bytes` gets the size of each piece once it is written. `durable`: it will be synced."""
        self._file = file
        self._count_bytes = count_bytes
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._durable = durable
        self._begun = 0
        """Bytes that the system was told to begin to write."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        for begin in range(0, len(data), CHUNK_BYTES):
            piece = memoryview(data)[begin : begin + CHUNK_BYTES]
            self._file.write(piece)
            self._hash.update(piece)
            self._bytes += len(piece)
            self._count_bytes(len(piece))
            if self._durable and self._bytes - self._begun >= WRITEBACK_BYTES:
                self._begin_to_write()

    def _begin_to_write(self) -> None:
        """Tell the system to begin; an error that it meets is the sync's as well, so it is not looked at."""
        if _sync_file_range is not None:
            self._file.flush()
            begin, size = ctypes.c_int64(self._begun), ctypes.c_int64(self._bytes - self._begun)
            _sync_file_range(self._file.fileno(), begin, size, _WRITE)
        self._begun = self._bytes

    @property
    def facts(self) -> FileFacts:
        """The size and the sha256 of what was written."""
        return {"sha256": self._hash.hexdigest(), "bytes": self._bytes}


Produce = Callable[[FileSink], object]
"""Writes the content of a file. It may be called again, with another sink, and then writes the same."""


class Writer:
    """Writes files below one directory in threads, and says what it has written.

    with Writer(directory) as writer:
        writer.add("config.json", b"{}")
        writer.add("model.safetensors", produce)
        facts = writer.finish()
    """

    def __init__(self, root: Path, count_bytes: CountBytes = hashing.unheard, durable: bool = True) -> None:
        """Files are named by their paths below `root`. `count_bytes`, called in any thread, gets the size of
        each piece that was written. Without `durable` nothing is synced.
        """
        self._root = root
        self._count_bytes = count_bytes
        self._durable = durable
        self._pool = ThreadPoolExecutor(THREADS, "writer")
        self._written: dict[str, Future[FileFacts]] = {}
        self._folders: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, content: bytes | Produce) -> None:
        """Begin to write a file. What `content` reads must stay as it is until `finish` has returned."""
        context = copy_context()  # which may say that a full disk is waited for
        path = self._root / name
        self._written[name] = self._pool.submit(
            context.run, write, path, content, self._count_bytes, self._durable
        )

    def link(self, name: str, source: Path, facts: FileFacts) -> None:
        """Begin to link a file to `source`, which has these facts; where that cannot be, it is copied."""
        task = (copy_context().run, link, source, self._root / name, facts, self._count_bytes, self._durable)
        self._written[name] = self._pool.submit(*task)

    def add_folder(self, name: str) -> None:
        """Make the folder in which files will be; what is in it is durable once `finish` has returned."""
        if (folder := self._root / name) not in self._folders:
            files.make_directory(folder)
            self._folders.add(folder)

    def give_up(self) -> None:
        """Write no further file, and wait until none is being written: their directory may go."""
        self._pool.shutdown(cancel_futures=True)

    def finish(self) -> dict[str, FileFacts]:
        """Wait until every file is written; their size and sha256 by name. Raises what `write` raises."""
        facts = {name: writing.result() for name, writing in self._written.items()}
        for folder in self._folders if self._durable else ():
            files.fsync_directory(folder)
        return facts


def write(
    path: Path, content: bytes | Produce, count_bytes: CountBytes = hashing.unheard, durable: bool = True
) -> FileFacts:
    """Make `path` a file with this content; returns its size and sha256.

    Raises SharedFsError, after a while if the error is one that passes, and leaves no temporary name behind.
    A failed attempt begins again: a second fsync alone would prove nothing, because the first one may have
    dropped what it could not write.
    """

    def attempt() -> tuple[Path, FileFacts]:
        temp = files.temporary_name(path)
        try:
            # Without O_EXCL: Python repeats a call after EINTR, and the first one may have created the file.
            with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, files.MODE), "wb") as file:
                sink = FileSink(file, count_bytes, durable)
                if isinstance(content, bytes):
                    sink.write(content)
                else:
                    content(sink)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except BaseException:
            files.drop(temp)
            raise
        return temp, sink.facts

    temp, facts = retry("write", path, attempt, path.parent, PASSING_AFTER_MKDIR, PATIENT_ATTEMPTS)
    try:
        files.rename(temp, path, durable=False)
    except OSError:
        files.drop(temp)
        raise
    return facts


def link(
    source: Path,
    path: Path,
    facts: FileFacts,
    count_bytes: CountBytes = hashing.unheard,
    durable: bool = True,
) -> FileFacts:
    """Make `path`, where nothing is, a hard link to the durable `source`, or a copy where there can be none.

    `facts`: of `source`, returned. Raises SharedFsError, and OSError if a copy comes to others.
    """
    try:
        retry("link", path, lambda: os.link(source, path), source)
        return facts
    except FileExistsError:  # maybe made by a call whose reply was lost
        if path.samefile(source):
            return facts
        raise
    except SharedFsError as error:
        if error.errno not in NO_LINKS:
            raise
    if write(path, copy_of(source), count_bytes, durable) != facts:
        files.drop(path)
        raise OSError(errno.EIO, f"{source} was read otherwise than before")
    return facts


def copy_of(path: Path) -> Produce:
    """Return the Produce of a copy of the file `path`."""

    def produce(sink: FileSink) -> None:
        for piece in hashing.pieces(path):
            sink.write(piece)

    return produce


def publish_directory(source: Path, target: Path) -> None:
    """Publish a copy of the files in `source` as `target`, which appears whole and durable."""
    staging = files.temporary_name(target)
    files.make_directory(staging)
    try:
        with Writer(staging) as writer:
            for path in source.iterdir():
                writer.add(path.name, copy_of(path))
            writer.finish()
        files.fsync_directory(staging)
        files.rename(staging, target)
    except BaseException:
        files.remove_tree(staging)
        raise
