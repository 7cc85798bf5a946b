"""This node's part of the training job: launched once, asked in every iteration, ended with the epoch."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.directory.layout import RunDir
from coordinator.journal.events import Say
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.machine.gpus import count_gpus
from coordinator.machine.network import free_port, interface_towards
from coordinator.machine.oddities import explained
from coordinator.protocol.exits import TrainerFailed
from coordinator.protocol.liveness import Stopwatch
from rollout.storage import files
from rollout.storage.hashing import FileFacts
from rollout.storage.retry import WAITING
from trainer.documents import TrainRequest
from trainer.job import launch, space_waits
from trainer.job.doorbell import Doorbell
from trainer.progress import NOT_SAVED
from trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a node looks at its trainers' progress, and at what ends the phase, while no bell rings."""
SUMMARY_LINES = 60
"""In so many last lines torchrun says which of its processes failed, and how."""
_SIGNALLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID (\d+)")


@dataclass
class _TrainingRequest:
    """What the trainers of this node are doing."""

    request: TrainRequest
    processes: int
    check: Callable[[], None]
    progress: Callable[[int, int], None]
    full: Callable[[str], None]
    reached: tuple[int, int] = (0, 0)
    still: Stopwatch = field(default_factory=lambda: Stopwatch(1.0))
    """Time since the processes were last seen to get on."""


class TrainerHost:
    """Starts, asks and ends the torchrun agent of this node."""

    def __init__(self, children: Children, run_dir: RunDir, rank: int, say: Say) -> None:
        self._children = children
        self._say = say
        self._run_dir = run_dir
        self._rank = rank
        self._child: Child | None = None
        self._bell: Doorbell | None = None
        self._meeting: dict[str, Any] = {}
        self._launches = 0
        self._number = 0
        self._trained = 0
        """The iteration that the job has trained last."""
        self._asked: _TrainingRequest | None = None

    def meeting(self, job: str, address: str) -> dict[str, Any]:
        """Return where the job meets (for the master): where it runs already, else `job` at a free port."""
        if self.is_alive():
            return self._meeting
        return {"job": job, "address": address, "port": free_port(address)}

    def is_alive(self) -> bool:
        """Return whether this node has a job, as far as it has noticed."""
        return self._child is not None and self._child.poll() is None

    def holds(self, job: str, iteration: int) -> bool:
        """Return whether this node takes part in `job` already, which has made the policy of `iteration`."""
        return self.is_alive() and self._meeting["job"] == job and self._trained == iteration

    def ensure(
        self, config: Mapping[str, Any], processes: int, threads: int, settings: TrainerSettings
    ) -> None:
        """Have this node's part of the job that `config` (phase 9's document) names."""
        if self._meeting and self._meeting["job"] == config["job"]:
            if not self.is_alive():
                raise TrainerFailed(f"the training job ended between iterations: {self._tail()}")
            return
        self.leave_epoch()
        spool = self._children.new_spool("trainer")
        job = launch.Launch(
            num_nodes=len(config["processes"]),
            node_rank=config["node_ranks"][str(self._rank)],
            processes=processes,
            master_addr=config["address"],
            master_port=config["port"],
            interface=interface_towards(config["address"]),
            spool=spool,
            threads=threads,
            start_timeout_s=settings.start_timeout_s,
            collective_timeout_s=settings.collective_timeout_s,
            ranks=tuple(sorted(map(int, config["node_ranks"]))),
            python=self._children.python,
            forks=self._children.shares_imports,
            gpus=count_gpus(),
        )
        self._bell = Doorbell(spool / launch.NODE_BELL)
        self._launches += 1
        self._number = self._trained = 0
        path = self._run_dir.logs(self._rank) / f"trainer.{config['job']}.{self._launches}.log"
        self._child = self._children.start(
            "trainer", launch.argv(job), env=launch.environment(job), log=path, echo=_echo_steps, spool=spool
        )
        self._say("trainer_start", job=config["job"])
        self._meeting = {name: config[name] for name in ("job", "address", "port")}

    def train(
        self,
        request: TrainRequest,
        processes: int,
        check: Callable[[], None],
        progress: Callable[[int, int], None],
        full: Callable[[str], None] = lambda _text: None,
    ) -> Mapping[str, FileFacts] | None:
        """One training phase. TrainerFailed if it fails or stands still for `stall_timeout_s`.

        While it lasts `check` is called, which may raise, `progress` with the parts done and expected, and,
        again and again while a trainer waits for space on a full disk, `full` with a text that says so.
        With request.ahead it may end before the checkpoint is durable, which `finish` waits for: then the
        files of the new policy in request.copy_dir are returned, none if there is no copy. None: all is done.
        """
        assert self._child is not None
        self._number += 1
        launch.submit(self._child.spool, self._number, request)
        self._asked = _TrainingRequest(request, processes, check, progress, full)
        while not self.is_done():
            if (
                request.ahead
                and (copy := launch.copied(self._child.spool, self._number, processes)) is not None
            ):
                return copy
            self._wait()
        return None

    def finish(self) -> None:
        """Wait until the trainers have done what `train` asked for; it raises as that."""
        while not self.is_done():
            self._wait()

    def is_done(self) -> bool:
        """Look once whether the trainers have done what `train` asked for; it raises as that."""
        job = self._asked
        if job is None:
            return True
        assert self._child is not None
        done, failure, comes_again = self._outcome(job.processes)
        if done:
            self._trained, self._asked = job.request.iteration, None
            return True
        if (parts := launch.progress(self._child.spool, self._number)) != job.reached:
            job.reached = parts
            job.progress(*parts)
            job.still.restart()
        if text := space_waits.take(self._child.spool, self._number):
            job.full(text)
        limit_s, still_s = job.request.settings.stall_timeout_s, job.still.look()
        if failure is None and limit_s is not None and still_s > limit_s:
            failure = f"no progress for {still_s:.0f} s, with {parts[0]} of {parts[1]} parts done"
        job.check()  # first: this node may have ended the job itself
        if failure is not None:
            self._keep_traces(self._child.spool, job.request)
            raise TrainerFailed(failure, comes_again)
        return False

    def _wait(self) -> None:
        assert self._bell is not None
        self._bell.wait(LOOK_S)

    def _outcome(self, processes: int) -> tuple[bool, str | None, bool]:
        """Return whether this node's trainers have done what they were asked; if they never will, why, and
        whether others would fail in the same way.
        """
        assert self._child is not None
        try:
            if launch.outcome(self._child.spool, self._number, processes) == "done":
                return True, None, False
        except launch.TrainerFailed as error:
            return False, _last_line(str(error)), error.comes_again
        if (code := self._child.poll()) is not None:
            error = RuntimeError(tail := self._tail())
            if (reason := explained(error)) is not error:
                return False, str(reason), True
            if killed := _SIGNALLED.findall(self._child.tail(SUMMARY_LINES)):
                signal, pid = killed[-1]  # the root cause comes last
                why = ", perhaps for lack of memory (dmesg)" if signal == "SIGKILL" else ""
                return False, f"its trainer, process {pid}, was ended by {signal}{why}", False
            return False, f"torchrun ended with exit status {code}: {tail}", False
        return False, None, False

    def _keep_traces(self, spool: Path, request: TrainRequest) -> None:
        """Copy what NCCL's flight recorder has left of a collective that hung to this node's logs."""
        for trace in sorted(spool.glob(f"{launch.TRACE}*")):
            name = f"e{request.epoch:04d}.i{request.iteration:06d}.{trace.name}"  # as torchfrtrace reads it
            files.publish(self._run_dir.logs(self._rank) / name, trace.read_bytes(), durable=False)
            log.error("what NCCL was doing is in %s", self._run_dir.logs(self._rank) / name)

    def kill_now(self) -> None:
        """Kill the job's processes here and wait for nothing; for any thread."""
        if (child := self._child) is not None:
            child.kill_now()

    def leave_epoch(self) -> None:
        """End the job: no trainer outlives the epoch that it was launched in."""
        if self._child is not None:
            self._child.kill()
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        self._child, self._meeting, self._asked = None, {}, None

    def _tail(self) -> str:
        tail = self._child.tail(20) if self._child is not None else ""
        return tail.strip() or "it printed nothing"


def _echo_steps(line: str) -> None:
    """Log the step line, for the terminal, and what a person must know; everything is in the log file."""
    if line.startswith(("step ", "no step", "checkpoint: ")):
        log.info("%s", line)
    elif NOT_SAVED in line or WAITING in line:
        log.error("%s", line)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it gave no reason"
