"""Write the files of a directory: each one whole, durable and hashed, several at once in threads.

A file is given as its bytes, or as a function that writes it (a library's `save`, say). The function writes
under a temporary name; then come fsync, hash and rename. A name itself becomes durable with the next
`files.publish` or `files.fsync_directory` in its directory.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout.storage import files
from rollout.storage.files import FileFacts
from rollout.storage.retry import PASSING_AFTER_MKDIR, PATIENT_ATTEMPTS, library_errors, retry

Produce = Callable[[Path], object]
"""Writes the file of this path. It may be called again, with another path, and then writes the same."""

THREADS = 8


class Writer:
    """Writes files below one directory in threads, and says what it has written.

    with Writer(directory) as writer:
        writer.add("config.json", b"{}")
        writer.add("model.safetensors", produce)
        facts = writer.finish()
    """

    def __init__(self, root: Path) -> None:
        """Files are named by their paths below `root`."""
        self._root = root
        self._pool = ThreadPoolExecutor(THREADS, "writer")
        self._written: dict[str, Future[FileFacts]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, content: bytes | Produce) -> None:
        """Begin to write a file. What `content` reads must stay as it is until `finish` has returned."""
        self._written[name] = self._pool.submit(write, self._root / name, content)

    def finish(self) -> dict[str, FileFacts]:
        """Wait until every file is written; their size and sha256 by name. Raises what `write` raises."""
        return {name: writing.result() for name, writing in self._written.items()}


def write(path: Path, content: bytes | Produce) -> FileFacts:
    """Make `path` a file with this content; returns its size and sha256.

    Raises SharedFsError, after a while if the error is one that passes, and leaves no temporary name behind.
    """
    if isinstance(content, bytes):
        temp = files.write_temporary(path, content)
        facts = files.facts_of(content)
    else:
        temp = _produce(path, content)
        facts = None
    try:
        facts = facts or files.file_facts(temp)
        files.rename(temp, path, durable=False)
    except OSError:
        files.drop(temp)
        raise
    return facts


def _produce(path: Path, produce: Produce) -> Path:
    """Let `produce` write a temporary file and make it durable; again from the start if that fails.

    A second fsync alone would prove nothing: the first one may have dropped what it could not write.
    """

    def attempt() -> Path:
        temp = files.temporary_name(path)
        try:
            # Without O_EXCL: Python repeats a call after EINTR, and the first one may have created the file.
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, files.MODE)
            try:
                mode = os.fstat(descriptor).st_mode & 0o777
            finally:
                os.close(descriptor)
            with library_errors():
                produce(temp)
            with open(temp, "rb") as file:  # a library may have put another file in its place
                if os.fstat(file.fileno()).st_mode & 0o777 != mode:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        except BaseException:
            files.drop(temp)
            raise
        return temp

    return retry("write", path, attempt, path.parent, PASSING_AFTER_MKDIR, PATIENT_ATTEMPTS)
