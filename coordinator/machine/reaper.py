"""The reaper of a node: a tiny process that ends the node's process groups once the node is gone. If that
died without a word, the reaper says the node's last one.

    python -I -S reaper.py SPOOL        stdin: the read end of a pipe whose only write end the node holds

`coordinator.machine.children` starts it and says why it is airtight. It imports all that it needs at its
start, so that a hung mount under the Python installation cannot keep it from its work, and nothing but the
standard library, to start in 15 ms.
"""

import contextlib
import fcntl
import glob
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable

PGID_DIR = "pgid"
"""In this subdirectory of a child's spool every process group to kill has a file named by its number."""
LAST_WORD = "last_word"
"""This file of a spool names a path, and behind a zero byte what is to be written there."""
SPEAK_S = 10
"""How long writing that may take: a hung mount must not keep this process."""
SETTLE_S = 0.3
"""A group that is still there this long after SIGKILL has only zombies that nobody reaps, or waits for a hung
mount and dies when that answers. Nothing more can be done about it."""
GIVE_UP_S = 60.0
"""How long new groups may go on registering."""
LOOK_S = 0.5
"""How often the reaper looks whether the node lives; a pipe that closes tells it at once."""


def kill_group(pgid: int) -> bool:
    """SIGKILL every process of a group, the stopped ones too. False if there is no such group."""
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the latter: nothing but zombies (macOS), or not ours
        return False
    return True


def sweep(directory: str, is_gone: Callable[[int], bool] = lambda pgid: False) -> bool:
    """Kill the groups that `directory` names, forget those that are gone, remove it if none is left.

    True once the directory is removed. From then on nobody can register there. `is_gone(pgid)` is asked
    about each group that could still be signalled.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return True
    for name in names:
        # killpg(0) would be this process's own group, killpg(1) every process there is.
        is_group = name.isdecimal() and int(name) > 1
        if not is_group or not kill_group(int(name)) or is_gone(int(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:  # not empty: a group is still dying, or one has registered since we looked
        return False
    return True


def is_killed(pid: int) -> bool:
    """Return whether a process was killed, although a hung mount still holds one of its threads."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            status = dict(line.split(":", 1) for line in file)
        return status["State"].split()[0] == "Z" or bool(int(status["SigPnd"], 16) >> signal.SIGKILL - 1 & 1)
    except (OSError, KeyError):
        return False


def pgid_directories(spool: str) -> list[str]:
    """Return where the process groups of a spool's children are written down."""
    return glob.glob(os.path.join(glob.escape(spool), "*", PGID_DIR))


def read_last_word(spool: str) -> tuple[bytes, bytes] | None:
    """Return the path and the content of the node's last word; None if it has ended in order."""
    try:
        with open(os.path.join(spool, LAST_WORD), "rb") as file:
            path, content = file.read().split(b"\0", 1)
        return path, content
    except FileNotFoundError:
        return None


def say(path: bytes, content: bytes) -> None:
    """Write a file, whole or not at all; what keeps it from that, or takes too long, ends this process."""
    signal.alarm(SPEAK_S)
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, b".%s.%08x.tmp" % (name, os.getpid()))
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o660), "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def main(spool: str) -> None:
    """Wait until the node is gone, end its groups, remove `spool`, say its last word."""
    node = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # systemd-tmpfiles removes what has lain in /tmp for ten days, but nothing below a locked directory.
    with contextlib.suppress(OSError):  # some filesystems refuse locks (ENOLCK, ENOSYS)
        fcntl.flock(os.open(spool, os.O_RDONLY), fcntl.LOCK_SH)
    while not select.select([0], [], [], LOOK_S)[0] or os.read(0, 4096):
        if os.getppid() != node or is_killed(node):  # the pipe is still open
            break
    first_killed_s: dict[int, float] = {}

    def is_gone(pgid: int) -> bool:
        now_s = time.monotonic()
        return now_s - first_killed_s.setdefault(pgid, now_s) > SETTLE_S

    deadline_s, pause_s = time.monotonic() + GIVE_UP_S, 0.002
    while time.monotonic() < deadline_s:
        if all([sweep(directory, is_gone) for directory in pgid_directories(spool)]):
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    last_word = read_last_word(spool)
    shutil.rmtree(spool, ignore_errors=True)
    if last_word is not None:
        say(*last_word)


if __name__ == "__main__":
    main(sys.argv[1])
