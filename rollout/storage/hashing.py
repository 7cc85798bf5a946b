"""Read files piece by piece, and recognise them by size and sha256, or by size and mtime."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from rollout.environment_variables import cores
from rollout.storage.files import file_names, operations
from rollout.storage.retry import retry

CountBytes = Callable[[int], object]
"""A function that is told how many bytes more were read or written."""
CHUNK_BYTES = 1 << 23


def unheard(size: int) -> None:
    """A progress callback that does nothing."""


class FileFacts(TypedDict):
    """The description of a file by which it is recognised."""

    bytes: int
    sha256: str


def facts_of(data: bytes) -> FileFacts:
    """Return the size and the sha256 of a file with this content."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def pieces(path: Path, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file from byte `begin` up to `end`, in pieces of at most CHUNK_BYTES.

    Each read is repeated from where it failed, so that a large file gets through where one call in thirty
    fails; nothing of it is mapped, so that an error is an exception and no signal. Raises as `read`.
    """
    operations["open"] += 1
    descriptor: int | None = None

    def more() -> bytes:
        nonlocal descriptor
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY)
        try:
            size = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - begin)
            return os.pread(descriptor, size, begin)
        except OSError:
            close()  # a stale handle stays stale
            raise

    def close() -> None:
        nonlocal descriptor
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            descriptor = None

    try:
        while piece := retry("read", path, more, path):
            begin += len(piece)
            yield piece
    finally:
        close()


def file_facts(path: Path, count_bytes: CountBytes = unheard) -> FileFacts:
    """Return the size and the sha256 of a file; `count_bytes` gets the size of each piece that was read."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces(path):
        digest.update(piece)
        size += len(piece)
        count_bytes(len(piece))
    return {"sha256": digest.hexdigest(), "bytes": size}


def size_and_mtime(path: Path) -> tuple[int, int]:
    """Return the size of a file, and its mtime in ns. Opens it: a client may remember an old size
    until then.
    """

    def look() -> tuple[int, int]:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            return facts.st_size, facts.st_mtime_ns

    return retry("look at", path, look, path)


def checksums(
    directory: Path,
    facts: Callable[[Path], FileFacts] = file_facts,
    names: Sequence[str] | None = None,
) -> dict[str, FileFacts]:
    """Return name -> size and sha256, by `facts` in threads, of files by their paths below the directory;
    None: of every regular file directly in it.
    """
    names = file_names(directory) if names is None else names
    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        return dict(zip(names, pool.map(facts, [directory / name for name in names]), strict=True))
