"""Locks between the processes of one user on one host: on its own disk, never on the shared mount."""

import os
import tempfile
from pathlib import Path

from filelock import FileLock


def host_lock(name: str) -> FileLock:
    """The lock of this name; not yet acquired."""
    folder = Path(tempfile.gettempdir()) / f"flagpost-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return FileLock(folder / f"{name}.lock")
