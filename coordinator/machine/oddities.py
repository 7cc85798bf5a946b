"""Oddities of a machine, which lacks what others have: containers and sandboxes leave out this and that.

A run goes on without it. `oddities` says in a line each what that costs, for the start and for `run doctor`.
"""

import contextlib
import ctypes
import errno
import fcntl
import multiprocessing
import os
import re
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from coordinator.machine import network
from coordinator.machine.gpus import count_gpus
from coordinator.machine.host_lock import is_lockable, own_folder
from coordinator.protocol.exits import NodeEnded
from coordinator.settings.tree import SettingsError
from rollout.environment_variables import control_groups
from rollout.storage import files
from trainer.job import launch

FEW_PROCESSES = 512
"""A node has some 20 processes, and threads count as processes: a torch process has dozens."""
LEAST_PROCESSES = 48
"""So many, with threads, has a run of one node on two cores."""
SMALL_SHM_BYTES = 1 << 30
_UP = 1
_AGAIN = re.escape(str(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
_TOO_FEW = re.compile(rf"^(?:\w+: )?(can't start new thread|{_AGAIN})$", re.MULTILINE)
"""How the error reads, also at the end of a child's traceback."""


class TooFewProcesses(RuntimeError):
    """This machine lets us start no further process or thread."""


def need_loopback() -> None:
    """Bring up the loopback interface, as a fresh network namespace has it down; SettingsError if we may not.

    Processes of one machine train over it.
    """
    if sys.platform != "linux" or (flags := _loopback_flags()) & _UP:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            fcntl.ioctl(control, 0x8914, struct.pack("16sh22x", b"lo", flags | _UP))
        except OSError as error:
            raise SettingsError(
                f"the loopback interface of this machine is down ({error.strerror}), and training needs it: "
                "`ip link set lo up` as root, or start the container with one (docker: --network none has it)"
            ) from None
    print("run: the loopback interface was down; it is up now", flush=True)


def _loopback_flags() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        data = fcntl.ioctl(control, 0x8913, struct.pack("16sh22x", b"lo", 0))
    return struct.unpack("16sh22x", data)[1]


def need_temporary(root: Path) -> None:
    """Have this process and its children put temporary files below the run directory where nothing else can
    be written.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = root / "tmp" / socket.gethostname()
        files.make_directory(folder.parent)
        files.make_directory(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        print(f"run: no directory for temporary files can be written here: they are in {folder}", flush=True)


def has_semaphores() -> bool:
    """Return whether processes can share semaphores, which lie in /dev/shm."""
    try:
        multiprocessing.Lock()
    except OSError:
        return False
    return True


def oddities() -> Iterator[str]:
    """Yield a line for each thing that this machine lacks, with what that costs."""
    if sys.platform != "linux":
        return
    if not _loopback_flags() & _UP:
        yield "the loopback interface is down: a start brings it up, which only root can do"
    if not network.has_boot_id():
        yield "no boot id (/proc): a restart of the machine under its processes goes unnoticed"
    if not _has_inotify():
        yield "no inotify instance is left: changes are seen by looking, some 0.1 s later"
    if not has_semaphores():
        yield "no semaphores, as /dev/shm cannot be written: `run local` starts more slowly"
    elif count_gpus() and (size := shutil.disk_usage("/dev/shm").total) < SMALL_SHM_BYTES:
        yield f"/dev/shm holds {size >> 20} MB: NCCL and vLLM may need more (docker: --shm-size 8g)"
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        yield "no directory for temporary files can be written: a run takes one below its own directory"
    with contextlib.suppress(NodeEnded, OSError):
        if not is_lockable(folder := own_folder("locks")):
            yield f"locks are refused in {folder}: files stand for them (or set TMPDIR to a local disk)"
    for variable in launch.INTERFACES:
        if (value := os.environ.get(variable)) and variable not in launch.interfaces_of_user():
            yield f"{variable}={value} is not followed: this machine has no such network interface"
    if (most := _most_processes()) is not None and most < FEW_PROCESSES:
        yield f"{most} processes and threads are allowed: a node may need more (docker: --pids-limit)"


def startable(most: int) -> int:
    """Return how many more threads can be started here, `most` at most; each counts as a process."""
    end = threading.Event()
    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):
        for _ in range(most):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    end.set()
    for thread in threads:
        thread.join()
    return len(threads)


def explained(error: BaseException) -> BaseException:
    """Return `error`, or why no further process or thread can be started if that is what it says."""
    if (match := _TOO_FEW.search(str(error))) is None:
        return error
    most = _most_processes()
    limit = f"{most} are" if most is not None else "no more are"
    return TooFewProcesses(
        f"{match[1]}: {limit} allowed here (ulimit -u; docker --pids-limit; pids.max); a node has "
        f"some 20 processes, with dozens of threads"
    )


def _has_inotify() -> bool:
    descriptor = ctypes.CDLL(None).inotify_init()
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _most_processes() -> int | None:
    """Return how many processes this user, or this container, may have; None without a limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [] if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else [soft]
    for folder in control_groups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((folder / "pids.max").read_text()))
    return min(limits, default=None)
