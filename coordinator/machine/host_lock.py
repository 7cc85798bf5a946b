"""Locks between the processes of one user on one host: on the host's disk, never on the shared mount."""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from coordinator.protocol.exits import Ended, Exit

log = logging.getLogger(__name__)

HOLDER_PATIENCE_S = 10.0
"""How long an older process may take to end."""


def host_lock(name: str) -> FileLock:
    """Return the lock of this name, not yet acquired."""
    folder = Path(tempfile.gettempdir()) / f"flagpost-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return FileLock(folder / f"{name}.lock")


def acquire(lock: FileLock, check: Callable[[], None], patience_s: float) -> bool:
    """Return whether the lock could be had within `patience_s`; `check` is called meanwhile, and
    may raise.
    """
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        check()
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            continue
        return True
    return False


def hold_for_process(name: str, who: str, check: Callable[[], None]) -> FileLock:
    """Acquire the lock `name` for as long as this process lives, and kill an older holder that does not end.

    `who` is for the error, Ended.
    Beside the lock file, another one holds the pid and the creation time of its holder: pids are used again.
    """
    lock = host_lock(name)
    holder = Path(lock.lock_file).with_suffix(".pid")
    if not acquire(lock, check, HOLDER_PATIENCE_S):
        _kill(holder)
        if not acquire(lock, check, HOLDER_PATIENCE_S):
            text = f"another process of {who} on this host does not end; its pid is in {holder}"
            raise Ended(Exit.FAILED, text)
    me = psutil.Process()
    holder.write_text(f"{me.pid} {me.create_time()}")
    return lock


def _kill(holder: Path) -> None:
    try:
        pid, created_s = holder.read_text().split()
        process = psutil.Process(int(pid))
        if process.create_time() == float(created_s):
            log.warning("killing the older process of this rank on this host, pid %s: it does not end", pid)
            process.kill()
    except (OSError, ValueError, psutil.Error) as error:
        log.warning("the older process of this rank on this host cannot be ended: %s", error)
