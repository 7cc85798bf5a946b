"""One command of a kind at a time on a directory: `run local`, `run serve`."""

import contextlib
import hashlib
import os
from collections.abc import Generator
from pathlib import Path

from filelock import Timeout

from coordinator.machine.host_lock import host_lock, if_stale
from coordinator.protocol.exits import NodeEnded
from coordinator.settings.tree import SettingsError


@contextlib.contextmanager
def alone(command: str, option: str, root: Path, advice: str) -> Generator[None]:
    """Hold a directory for one such command of this user on this machine; SettingsError names another.

    `option`: what named the directory. `advice`: what to do about the other one.
    """
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    try:
        lock = host_lock(f"{command.rpartition(' ')[2]}-{name}")
    except NodeEnded as error:
        raise SettingsError(error.text) from None
    holder = Path(lock.lock_file).with_suffix(".pid")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        pid = holder.read_text().strip() if holder.exists() else "unknown"
        raise SettingsError(
            f"{option} {root}: {command} is at work there, pid {pid}; {advice}{if_stale(lock)}"
        ) from None
    try:
        holder.write_text(f"{os.getpid()}\n")
        yield
    finally:
        lock.release()
