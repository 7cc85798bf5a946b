"""The keeper of a node: a tiny process that ends the node's process groups once the node is gone, and starts
a stand-in while the node's interpreter is held.

    python -I -S keeper.py SPOOL        stdin: the read end of a pipe whose only write end the node holds

`coordinator.machine.children` starts it and says why it is airtight. It imports all that it needs at its
start, so that a hung mount under the Python installation cannot keep it from its work, and nothing but the
standard library, to start in 15 ms.

*A held interpreter.* User code that computes in C without letting go of the interpreter stops all threads of
the node, so that it looks dead. Then the node's pulse (`coordinator.machine.pulse`) stands still although the
process is neither stopped nor a zombie, and the keeper starts `coordinator.machine.stand_in`. That is a
process of its own because it uses the shared directory, where a call may hang; the keeper may not.
"""

import contextlib
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable

PGID_DIR = "pgid"
"""In this subdirectory of a child's spool every process group to kill has a file named by its number."""
SETTLE_S = 0.3
"""A group that is still there this long after SIGKILL has only zombies that nobody reaps, or waits for a hung
mount and dies when that answers. Nothing more can be done about it."""
GIVE_UP_S = 60.0
"""How long new groups may go on registering."""
PULSE = "pulse"
"""A file in the spool that a thread of the node writes every PULSE_S: who the node is, and `patience_s`."""
PULSE_S = 0.5


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


def is_schedulable(pid: int) -> bool:
    """Return whether a process is neither stopped nor a zombie; False where nobody can know it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in {b"T", b"t", b"Z", b"X"}
    except OSError:
        return False


def is_killed(pid: int) -> bool:
    """Return whether a process was killed, although a hung mount still holds one of its threads."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            about = dict(line.split(":", 1) for line in file)
        return about["State"].split()[0] == "Z" or bool(int(about["SigPnd"], 16) >> signal.SIGKILL - 1 & 1)
    except (OSError, KeyError):
        return False


def pgid_directories(spool: str) -> list[str]:
    """Return where the process groups of a spool's children are written down."""
    return glob.glob(os.path.join(glob.escape(spool), "*", PGID_DIR))


class Pulse:
    """Looks at the node's pulse, and starts a stand-in when it has stood still for `patience_s`."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._written_ns = 0
        self._still_since_s = 0.0
        self._stand_in: int | None = None

    def look(self) -> None:
        """Look once."""
        if self._stand_in is not None and os.waitpid(self._stand_in, os.WNOHANG)[0]:
            self._stand_in = None
        try:
            path, now_s = os.path.join(self._spool, PULSE), time.monotonic()
            written_ns = os.stat(path).st_mtime_ns
            with open(path, encoding="utf-8") as file:
                node = json.load(file)
        except OSError:  # the node has none yet, or no more
            return
        if written_ns != self._written_ns or not is_schedulable(node["pid"]) or self._stand_in is not None:
            self._written_ns, self._still_since_s = written_ns, now_s
        elif now_s - self._still_since_s >= node["patience_s"]:
            argv = [sys.executable, "-P", "-m", "coordinator.machine.stand_in", self._spool]
            without_pipe = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
            self._stand_in = os.posix_spawn(argv[0], argv, os.environ, file_actions=without_pipe)

    def end(self) -> None:
        """Kill the stand-in: the node is gone."""
        if self._stand_in is not None:
            os.kill(self._stand_in, signal.SIGKILL)


def main(spool: str) -> None:
    """Wait until the node is gone, end its groups, remove `spool`."""
    node = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # systemd-tmpfiles removes what has lain in /tmp for ten days, but nothing below a locked directory.
    fcntl.flock(os.open(spool, os.O_RDONLY), fcntl.LOCK_SH)
    pulse = Pulse(spool)
    while not select.select([0], [], [], PULSE_S)[0] or os.read(0, 4096):
        if os.getppid() != node or is_killed(node):  # the pipe is still open
            break
        pulse.look()
    pulse.end()
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
    shutil.rmtree(spool, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
