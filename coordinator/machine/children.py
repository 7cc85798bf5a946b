"""The child processes of a node (engine servers, trainer, model builder). None of them outlives the node.

Parent-death signals fire when a *thread* ends and miss grandchildren, and the trainer's workers run in
sessions of their own. So every process group to kill is written down on the local disk, and a *reaper*
(`reaper.py`), a process in a session of its own, holds the read end of a pipe to the node. At end of file
(the node has exited, or was killed) it kills every group that is written down, removes the spool and exits.
A node that was killed keeps the pipe open while one of its threads sits in a hung mount, and a process that
it has forked without exec shares the pipe. So the reaper also looks twice a second whether the node lives.

    /tmp/flagpost-x1y2z3/     Children.spool, mode 0700; the reaper removes it; also for engines' sockets
      last_word               what the reaper tells the others if the node dies
      trainer-3/              Child.spool, one for each child; also for files between the node and this child
        pgid/4711, 4720       its process groups: its own, and those of grandchildren in other sessions

*Who registers.* A group registers itself, by making the file named by its number before it does anything
else: a child, and a trainer's worker, by a one-line shell (`trainer.job.launch.LAUNCHER`) that then
becomes the program by exec; a fork (`trainer.job.forks`) by itself. A process that cannot make the file,
because the directory is gone, exits.

*Why that is airtight.* The reaper, and `Child.kill`, list `pgid/`, kill, forget what is gone and then try
to remove the directory. A file made before that makes the removal fail, and the next pass kills its group;
after it the file cannot be made, and the process exits. So there is no window between fork and
registration, nor while the killing goes on. A killed group does not escape by forking: SIGKILL reaches all
its members.

*Reused numbers.* No process gets the pid P while anything, even a zombie, is in group P. A child's file is
removed when it is reaped, and a fork's before; workers' files go with their trainer, which ends when one of
them does. So a file could name a stranger only if all pids went round in these moments.
"""

import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from coordinator.machine import reaper
from coordinator.machine.child import FLUSH_S, KILL_S, Child, only_zombies
from coordinator.machine.gpus import count_gpus
from coordinator.machine.host_lock import own_folder
from coordinator.machine.oddities import has_semaphores
from coordinator.settings.node_groups import GroupSettings
from rollout.engines.kinds.kind import OWN_SOCKETS_BYTES, SOCKET_BYTES
from trainer.job import forks
from trainer.job.launch import READ_AT_IMPORT

logger = logging.getLogger(__name__)

FORKS, COLLECTORS = "FLAGPOST_FORKS", "FLAGPOST_COLLECTORS"
PROGRAMS = {
    FORKS: (
        *("rollout.engines.embedded.server", "trainer.job.agent", "trainer.model.check"),
        *("trainer.model.tiny", "trainer.job.rank"),
        "transformers.models.qwen3.modeling_qwen3",  # of the ranks that an agent forks
    ),
    COLLECTORS: ("coordinator.collector.process",),
}
"""What `run local` has imported once, by the environment variable that tells its nodes the socket of such a
`trainer.job.forks`. Collectors have a process of their own, without torch: user code may set variables that
libraries read as they are imported."""
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Set unless the user says otherwise: nodes on one machine must not spin on its cores while they wait. But
a few microseconds of it are cheaper than sleeping between the many short parts of a step (measured: 150
against 250 ms for one of 2 threads)."""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
"""Set unless the user says otherwise, for glibc: it maps each large tensor anew, and the kernel fills it with
zeros first. From its own heap a step on a CPU takes a tenth less."""


class ChildError(RuntimeError):
    """A child process cannot be started."""


class Children:
    """The child processes of this node and their reaper. A context manager: leaving it ends them all."""

    def __init__(self) -> None:
        self.group: GroupSettings | None = None
        """The node's group of machines, if it is in one: it has an environment, or a Python, for children."""
        self.spool = _new_spool()
        self._shared: dict[str, str] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._children: list[Child] = []
        self._is_ending = False
        self._closed = False
        self._reaper = self._start_reaper()

    @property
    def shares_imports(self) -> bool:
        """Whether engines and trainers are forks of one process of this machine."""
        return FORKS in os.environ and self.group is None

    def share_imports(self) -> Mapping[str, str]:
        """Start a process that imports what engines and trainers do, and have all nodes that are started from
        now on fork theirs from it. Return what this adds to their environment: nothing on a machine with
        GPUs, as what has used one is not fit to fork, nor without semaphores, by which forks speak to their
        agent, nor if this process has been told of one that another has started.
        """
        return {} if count_gpus() or not has_semaphores() else self._share(FORKS, READ_AT_IMPORT)

    def share_collectors(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Start a process that imports what collectors do, with the environment `env`; see share_imports."""
        return self._share(COLLECTORS, env)

    def _share(self, name: str, env: Mapping[str, str]) -> Mapping[str, str]:
        if not hasattr(os, "pidfd_open") or name in os.environ:
            return {}
        socket = str(self.spool / f"forks-{len(self._shared)}.sock")
        argv = [sys.executable, "-P", "-m", "trainer.job.forks", socket, *PROGRAMS[name]]
        self.start("imports", argv, env=env)
        self._shared[name] = socket
        return self._shared

    @property
    def python(self) -> str:
        """The Python that runs engine and trainer."""
        return (self.group and self.group.program) or sys.executable

    def explained(self, error: BaseException) -> BaseException:
        """Return `error`, or what it comes from if somebody has removed the spool."""
        if self.spool.exists():
            return error
        return ChildError(
            f"{self.spool} was removed while this node ran, maybe by a cleaner of old files; set TMPDIR "
            "to a directory of this machine that nobody cleans"
        )

    def new_spool(self, name: str) -> Path:
        """Make the spool of a child that is about to start, for arguments that must name it."""
        spool = self.spool / f"{name}-{next(self._numbers)}"
        spool.mkdir()  # not its parents: that this node's own was removed is to be said
        (spool / reaper.PGID_DIR).mkdir()
        return spool

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
        spool: Path | None = None,
    ) -> Child:
        """Start a program in a session of its own; its stdout and stderr go to `tail`, `log` and `echo`.

        `env` is added to this process's environment, and to what the group says. `log` is appended to and
        may be on the shared mount: if that hangs, neither the child nor the node does. `echo` is called with
        each line, in a thread of its own. `spool` is from `new_spool`; without it one is made. ChildError if
        there is no such program.
        """
        # PyTorch would run what it finds in a folder of /tmp whose name other users can guess.
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(own_folder("compiled"))}
        of_group = self.group.env if self.group else {}
        defaults = {**PASSIVE_THREADS, **KEPT_MEMORY, **compiled}
        environment = {**defaults, **os.environ, **self._shared, **of_group, **(env or {})}
        if shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise ChildError(f"cannot start {name}: no program {argv[0]!r}; is it installed, and in PATH?")
        with self._lock:
            if self._is_ending:
                raise ChildError(f"cannot start {name}: this node is ending its children")
            self._ensure_reaper()
            self._children = [child for child in self._children if child.spool.exists()]
            spool = spool or self.new_spool(name)
            if self.group is None:
                argv = as_fork(argv, str(spool / reaper.PGID_DIR))
            child = Child(name, argv, env=environment, spool=spool, log=log, echo=echo)
            self._children.append(child)
            return child

    def leave_word(self, path: Path, content: bytes) -> None:
        """Have the reaper write `content` to `path` if this node dies without `close`; the last counts."""
        temporary = self.spool / f"{reaper.LAST_WORD}.tmp"
        try:
            temporary.write_bytes(b"%s\0%s" % (os.fsencode(path.absolute()), content))
            temporary.replace(self.spool / reaper.LAST_WORD)
        except OSError as error:
            logger.warning("the others would not hear at once if this node died: %s", error)

    def kill_groups(self) -> bool:
        """SIGKILL all groups of all children at once, wait as `Child.kill`. False if something is left."""
        with self._lock:
            children = list(self._children)
        for child in children:
            child.kill_now()
        return all([child.kill() for child in children])

    def end_now(self) -> None:
        """SIGKILL all children, and let no other start. Takes no lock: the main thread may hang with it."""
        self._is_ending = True
        deadline_s = time.monotonic() + KILL_S
        directories = reaper.pgid_directories(str(self.spool))
        while not all([reaper.sweep(directory, only_zombies) for directory in directories]):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.05)

    def close(self, grace_s: float = 5.0) -> None:
        """End all children (SIGTERM, after `grace_s` SIGKILL), then the reaper, which removes the spool."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._is_ending = True
        (self.spool / reaper.LAST_WORD).unlink(missing_ok=True)
        for child in self._children:
            child.terminate()
        deadline_s = time.monotonic() + grace_s
        for child in self._children:
            child.wait(max(0.0, deadline_s - time.monotonic()))
        self.kill_groups()
        self._ensure_reaper()
        try:
            self._reaper.communicate(timeout=FLUSH_S)  # closes the pipe
        except subprocess.TimeoutExpired:
            logger.warning("the reaper (pid %d) stays until what was killed is gone", self._reaper.pid)

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(self.spool)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def _ensure_reaper(self) -> None:
        """Start another reaper if somebody killed it."""
        if self._reaper.poll() is not None:
            self._reaper = self._start_reaper()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_fork(argv: Sequence[str], groups: str) -> Sequence[str]:
    """Return the command of a client that has a program forked, if this process was told who can; else the
    program's own.
    """
    for name, modules in PROGRAMS.items():
        if name in os.environ and forks.is_program(argv, modules):
            return forks.client(os.environ[name], groups, argv)
    return argv


def _new_spool() -> Path:
    """Make a directory that only this user can enter, and where the paths of engines' sockets fit."""
    longest = SOCKET_BYTES - OWN_SOCKETS_BYTES - len("/flagpost-12345678")
    long = len(os.fsencode(tempfile.gettempdir())) > longest
    return Path(tempfile.mkdtemp(prefix="flagpost-", dir="/tmp" if long else None))
