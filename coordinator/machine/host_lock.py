"""Locks between the processes of one user on one host: on its own disk, never on the shared mount."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout


def host_lock(name: str) -> FileLock:
    """The lock of this name; not yet acquired."""
    folder = Path(tempfile.gettempdir()) / f"flagpost-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return FileLock(folder / f"{name}.lock")


def acquire(lock: FileLock, check: Callable[[], None], patience_s: float) -> bool:
    """Whether the lock could be had within `patience_s`; `check` is called meanwhile, and may raise."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        check()
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            continue
        return True
    return False
