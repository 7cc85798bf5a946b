"""The entries of a store, one directory for each copy: who has which one, and which go when room is needed.

The docstring of Store says what is in them, and who has which lock.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollout.storage.hashing import CountBytes

UNUSED = 2
"""Copies that stay although no process uses them: the next start of a run needs them."""
LOOK_S = 0.1
"""How often a node looks whether another one has finished a copy."""
TRIES = 100
"""How often a directory that was just made may be gone when it is opened, LOOK_S apart."""
COPY, PART, NEW = "copy", "part", "new-"


class StoreError(RuntimeError):
    """A model does not fit on this machine. The message names the folder and the setting."""


def acquire(entry: Path, fill: Callable[[], None], count_bytes: CountBytes) -> int:
    """Return a descriptor of `entry` with a shared lock, once its copy is there; `fill` makes it."""
    while True:
        descriptor = _open(entry)
        try:
            if _lock(descriptor, entry, fcntl.LOCK_EX) and not (entry / COPY).is_dir():
                fill()
            if use(descriptor, entry):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        count_bytes(0)
        time.sleep(LOOK_S)


def use(descriptor: int, entry: Path) -> bool:
    """Take the shared lock of an entry, also in place of the exclusive one. Return whether it could be had
    and the copy is there.
    """
    # To take one lock for the other lets go of it in between.
    return _lock(descriptor, entry, fcntl.LOCK_SH) and (entry / COPY).is_dir()


def begin_copy(folder: Path) -> tuple[Path, int]:
    """Make an entry without a key; return it, and a descriptor with its exclusive lock. Raises OSError."""
    for _attempt in range(TRIES):
        entry = Path(tempfile.mkdtemp(prefix=NEW, dir=folder))
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has taken it for one that nobody uses
            time.sleep(LOOK_S)
            continue
        try:
            if _lock(descriptor, entry, fcntl.LOCK_EX):
                return entry, descriptor
        except StoreError:
            os.close(descriptor)
            entry.rmdir()
            raise
        os.close(descriptor)
    raise _unseen(folder)


def make_room(folder: Path, size: int) -> int:
    """Remove copies that no process uses, the least recently used first, until at most UNUSED are left and
    `size` bytes are free, or none is left. Returns how many bytes are free.
    """
    for entry in folder.glob(f"{NEW}*"):  # of a node that was killed
        remove(entry)
    unused = [entry for entry in sorted(folder.iterdir(), key=_used_ns) if _if_unused(entry, lambda: None)]
    while unused and (len(unused) > UNUSED or shutil.disk_usage(folder).free < size):
        remove(unused.pop(0))
    return shutil.disk_usage(folder).free


def remove(entry: Path) -> None:
    """Remove an entry, unless a process uses it."""
    _if_unused(entry, lambda: shutil.rmtree(entry, ignore_errors=True))


def _if_unused(entry: Path, act: Callable[[], None]) -> bool:
    """Call `act` while no process uses `entry` or begins to; return whether it was called."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # another process has removed it
        return False
    try:
        if free := _flock(descriptor, fcntl.LOCK_EX):
            act()
        return free
    except StoreError:  # what is in use cannot be told
        return False
    finally:
        os.close(descriptor)


def _used_ns(entry: Path) -> int:
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _open(entry: Path) -> int:
    for _attempt in range(TRIES):
        entry.mkdir(exist_ok=True)
        try:
            return os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has just removed it
            time.sleep(LOOK_S)
    raise _unseen(entry.parent)


def _unseen(folder: Path) -> StoreError:
    return StoreError(
        f"{folder} does not show the directories that are made there; give this node cluster.local_dir=DIR, "
        "a directory on a disk of its own"
    )


def _lock(descriptor: int, entry: Path, kind: int) -> bool:
    """Take a lock without waiting for it; return whether it could be had, and `entry` is still the directory
    that was opened.
    """
    if not _flock(descriptor, kind):
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), entry.stat())
    except FileNotFoundError:
        return False


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"locks are refused where copies of models lie ({error.strerror}); give this node "
            "cluster.local_dir=DIR, a directory on a disk that takes them"
        ) from error
    return True
