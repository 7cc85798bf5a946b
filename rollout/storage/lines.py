"""Append lines to a file of the shared directory."""

import os
from pathlib import Path

from rollout.storage.files import operations
from rollout.storage.retry import PASSING_AFTER_MKDIR, retry


def append_line(path: Path, line: str) -> None:
    """Append `line`, durably and once, after ending a last line that a crash has left torn."""
    operations["open"] += 1
    data = line.encode() + b"\n"
    attempts = 0

    def append() -> None:
        nonlocal attempts
        attempts += 1
        with open(path, "ab+", buffering=0) as file:  # a buffer would be written again by close
            file.seek(max(0, file.tell() - len(data)))
            end = file.read()
            unwritten = data if not end or end.endswith(b"\n") else b"\n" + data
            if attempts > 1 and end == data:  # the attempt before has written it, and only reported a failure
                unwritten = b""
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())

    retry("append to", path, append, path.parent, PASSING_AFTER_MKDIR)
