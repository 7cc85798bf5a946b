"""Locks between the processes of one user on one host: on the host's disk, never on the shared mount."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from coordinator.protocol.exits import Exit, NodeEnded
from rollout.environment_variables import is_utf8
from rollout.storage.retry import retry

log = logging.getLogger(__name__)

UNUSED_S = 7 * 86400.0
"""A link that nobody has asked for since, and whose directory was removed, is removed too."""
EMPTY_S = 2.0
"""How long a lock's file may be empty: its holder writes there as soon as it has made it."""
HOLDER_PATIENCE_S = 15.0
"""How long an older process may take to end. It waits for its collector first (collector.host.REACT_S)."""


def own_folder(name: str, below: str | None = None) -> Path:
    """Return this user's folder of that name in the directory `below`, by default the machine's directory for
    temporary files; make it if it is not there.

    Every user may write there, so somebody else may have made it before. Raises Ended unless it is a
    directory, belongs to this user, and is closed to all others. `$XDG_RUNTIME_DIR` would be closed too, but
    it is removed when the user logs out, also under a run that goes on in tmux.
    """
    folder = Path(below or tempfile.gettempdir()) / f"flagpost-{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        fault = "is not a directory"
    elif facts.st_uid != os.getuid():
        fault = f"belongs to user {facts.st_uid}, not to {os.getuid()}"
    elif mode := stat.S_IMODE(facts.st_mode) & 0o077:
        fault = f"is open to other users (mode {mode | 0o700:o})"
    else:
        return folder
    other = "give another cluster.local_dir" if below else "set TMPDIR to a directory that is yours alone"
    text = f"{folder} {fault}: remove it, or {other}"
    raise NodeEnded(Exit.FAILED, text)


def link_in_utf8(directory: Path) -> Path:
    """Return a name in UTF-8 for a directory: a link to it on this machine, if its own name is none.

    Libraries that load weights and tokenizers take no other names.
    """
    if is_utf8(directory):
        return directory
    link = own_folder("paths") / hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    try:
        link.symlink_to(directory)
    except FileExistsError:
        os.utime(link, follow_symlinks=False)
    for other in link.parent.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - other.lstat().st_mtime > UNUSED_S and _is_removed(other.readlink()):
                other.unlink()
    return link


def _is_removed(directory: Path) -> bool:
    """Return whether somebody has removed a directory, and not only its mount is away."""
    return directory.parent.is_dir() and not os.path.lexists(directory)


def is_lockable(folder: Path) -> bool:
    """Return whether the filesystem of a folder takes locks; some refuse them (ENOLCK, ENOSYS)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def lock_of(path: Path) -> BaseFileLock:
    """Return a lock, not yet acquired; where locks are refused, a file with its holder's pid is it. One whose
    holder is gone is taken over, also one that was killed before it had written its pid.
    """
    if is_lockable(path.parent):
        return FileLock(path)
    path_of_lock = path.with_suffix(".held")
    _remove_empty(path_of_lock)
    return SoftFileLock(path_of_lock)


def _remove_empty(path: Path) -> None:
    """Remove a lock's file that stays empty: a holder that lives writes its pid at once."""
    with contextlib.suppress(FileNotFoundError):
        if (before := path.stat()).st_size:
            return
        time.sleep(EMPTY_S)
        if path.stat() == before:
            log.warning("%s is empty: its holder was killed before it had written its pid", path)
            path.unlink()


def if_stale(lock: BaseFileLock) -> str:
    """Return the advice on a lock that others hold, or nothing: a file that stands for one may have outlived
    its holder where that cannot be seen, on another host or in another container.
    """
    return f"; if nothing runs, remove {lock.lock_file}" if isinstance(lock, SoftFileLock) else ""


def host_lock(name: str) -> BaseFileLock:
    """Return the lock of this name, not yet acquired."""
    return lock_of(own_folder("locks") / f"{name}.lock")


def acquire(lock: BaseFileLock, check: Callable[[], None], patience_s: float) -> bool:
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


def name_of_run(run_json: Path, run_id: str) -> str:
    """Return a name for a run in its directory, for locks: a copy of the directory has another one.

    A copy has the run id too, and its nodes must not end those of the original. What tells them apart is the
    ctime of run.json, which is never written again and which nobody can set: the filesystem takes it when the
    copy is made. All mounts of one directory show the same, while st_dev belongs to the mount, a FUSE mount
    may invent st_ino, and the path is what the user has chosen. A change of run.json's mode or links between
    two starts changes the name: then a stopped process of the rank is only superseded, not ended.
    """

    def changed_ns() -> int:
        with open(run_json, "rb") as file:  # a client may remember an old ctime until the file is opened
            return os.fstat(file.fileno()).st_ctime_ns

    return f"{run_id}.{retry('look at', run_json, changed_ns, run_json):x}"


def hold_for_process(name: str, owner: str, check: Callable[[], None]) -> BaseFileLock:
    """Acquire the lock `name` for as long as this process lives, and kill an older holder that does not end.

    `owner` is for the error, Ended.
    Beside the lock file, another one says which process holds it: pids are used again.
    """
    lock = host_lock(name)
    holder = Path(lock.lock_file).with_suffix(".pid")
    if not acquire(lock, check, HOLDER_PATIENCE_S):
        _kill(holder)
        if not acquire(lock, check, HOLDER_PATIENCE_S):
            text = f"another process of {owner} on this host does not end; its pid is in {holder}"
            raise NodeEnded(Exit.FAILED, f"{text}{if_stale(lock)}")
    holder.write_text(json.dumps(_facts(psutil.Process())))
    return lock


def _facts(process: psutil.Process) -> dict[str, Any]:
    """Return the facts that identify a process of this user on this host."""
    return {
        "pid": process.pid,
        "created_s": process.create_time(),
        "user": process.uids().real,
        "command": process.cmdline(),
    }


def _kill(holder: Path) -> None:
    """Kill the process that `holder` names, if it is still the same one and belongs to this user."""
    try:
        recorded = json.loads(holder.read_text())
        process = psutil.Process(recorded["pid"])
        if recorded["user"] != os.getuid() or recorded != _facts(process):
            return
        log.warning(
            "killing the older process of this rank on this host, pid %s: it does not end", recorded["pid"]
        )
        process.kill()
    except (OSError, ValueError, TypeError, KeyError, psutil.Error) as error:
        log.warning("the older process of this rank on this host cannot be ended: %s", error)
