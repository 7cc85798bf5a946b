"""A real Slurm on one machine: slurmctld, and one slurmd for each made-up node, in a directory of their own.

    with Slurm(directory, nodes=3) as slurm:
        job = slurm.sbatch("scripts/node.sbatch", "--log-path", "/tmp/run", cwd=repository)
        slurm.until(job, "COMPLETED")

From Debian's packages (`PACKAGES`), with a munge key of its own; every daemon listens on 127.0.0.1 alone.
"""

import contextlib
import functools
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from coordinator.machine.network import LOOPBACK
from tests.ports import unused_port

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue", "munged")
GPUS = 8
"""What each node says it has: plain files stand for the devices."""
START_S = 60.0
STOP_S = 60.0
REQUEUE_S = 5
"""How long a job that was queued again waits at least; 120 s where it is not set, 5 s at least."""

CONF = """\
ClusterName=test
SlurmctldHost={host}({loopback})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire={requeue}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
NodeName={name} NodeHostname={host} NodeAddr={loopback} Port={port} \
CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}
"""


class Slurm:
    """The cluster. A context manager: leaving it ends every process of it, those of jobs included."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root = root
        self.names = [f"n{i}" for i in range(nodes)]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(root / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._configure()
            self._start("munged", "--foreground", "--force", *self._munge_options())
            self.poll(lambda: (self.root / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i")
            for name in self.names:
                self._start("slurmd", "-D", "-N", name)
            idle = str(len(self.names))
            self.poll(lambda: self._ask("sinfo", "-h", "-t", "idle", "-o", "%D") == idle, "the nodes")
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end()

    def sbatch(self, script: Path, *words: str, cwd: Path, options: Sequence[str] = (), **more: str) -> str:
        """Submit `script`; the job's number. `options` are sbatch's, `more` is added to the environment."""
        command = ["sbatch", "--parsable", *options, str(script), *words]
        return self._ask(*command, cwd=cwd, env={**self.environment, **more})

    def scontrol(self, *words: str) -> str:
        """What `scontrol` answers."""
        return self._ask("scontrol", *words)

    def scancel(self, *words: str) -> None:
        """End a job, or send it a signal."""
        self._ask("scancel", *words)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode ..."""
        words = self.scontrol("--oneliner", "show", "job", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def until(self, job: str, state: str, restarts: int = 0, timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until the job, started again `restarts` times, is in `state`; what Slurm then knows of it."""

        def reached() -> dict[str, str] | None:
            known = self.job(job)
            here = (known["JobState"], int(known["Restarts"]))
            assert known["JobState"] in {state, "PENDING", "RUNNING", "COMPLETING"} or here[1] < restarts, (
                known
            )
            return known if here == (state, restarts) else None

        return self.poll(reached, f"{state} of job {job}", timeout_s)

    def hurry(self, job: str) -> None:
        """Let a job that was queued again start soon: not within the second that revoked its credential."""
        self.scontrol("update", f"JobId={job}", "StartTime=now+2")

    def processes(self, job: str) -> list[str]:
        """The processes that a job has started, however, on any of the nodes."""
        found: list[str] = []
        for process in self._of_jobs({"SLURM_JOB_ID": job}):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        return found

    def logs(self) -> str:
        """The daemons' last words, for messages."""
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        common = {"host": host, "loopback": LOOPBACK}
        text = CONF.format(
            **common, port=unused_port(), user=getpass.getuser(), root=self.root, requeue=REQUEUE_S
        )
        for name in self.names:
            text += NODE.format(**common, name=name, port=unused_port(), cpus=os.cpu_count(), gpus=GPUS)
            (self.root / name).mkdir()
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not asked to do anything
        for i in range(GPUS):
            (self.root / f"gpu{i}").touch()
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{GPUS - 1}]\n")
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _munge_options(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.root}/munge.{name}" for option, name in files.items()]
        return [*options, f"--log-file={self.root}/munge.log", "--num-threads=10"]

    def _start(self, program: str, *words: str) -> None:
        with open(self.root / "daemons.log", "ab") as log:
            daemon = subprocess.Popen(
                [program, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._daemons.append(daemon)

    def _ask(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=env or self.environment, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def poll(self, ready: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
        """Poll until `ready()` is true; its value."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if value := ready():
                return value
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come within {timeout_s} s\n{self.logs()}")

    def _end(self) -> None:
        """Jobs first: what guards their steps (slurmstepd), which nobody else ends, goes with them."""
        if len(self._daemons) > 1:
            with contextlib.suppress(AssertionError):  # the daemons end all the same
                self.scancel(f"--user={getpass.getuser()}")
                for process in self._of_jobs({}):
                    process.kill()
                self.poll(lambda: not self._ask("squeue", "-h"), "the end of all jobs", STOP_S)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_S)
            daemon.kill()
            daemon.wait()

    def _of_jobs(self, mark: dict[str, str]) -> list[psutil.Process]:
        """The processes that jobs of this cluster have started and whose environment has `mark`."""
        mark = {"SLURM_CONF": self.environment["SLURM_CONF"], **mark}
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()  # daemons have no SLURM_JOB_ID
                if mark.items() <= environment.items() and "SLURM_JOB_ID" in environment:
                    found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        return found


@functools.cache
def unavailable() -> str | None:
    """Why there is no Slurm here, for pytest.skip; None if there is."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    packages = ", ".join(PACKAGES)
    return f"a real Slurm needs {', '.join(missing)} (Debian: {packages})" if missing else None
