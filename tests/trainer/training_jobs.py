"""Real training jobs for tests: a node's part of one, as a node starts and ends it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.imports import forked
from trainer.documents import TrainRequest, TrainResult
from trainer.job import launch

JOB_TIMEOUT_S = 90.0


class Node:
    """One node's torchrun agent and spool; `kill` does what a node and its reaper do."""

    def __init__(
        self,
        spool: Path,
        port: int,
        num_nodes: int,
        node_rank: int,
        processes: int,
        collective_timeout_s: float = JOB_TIMEOUT_S,
        start_timeout_s: float = JOB_TIMEOUT_S,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        (spool / "pgid").mkdir(parents=True)
        self.spool = spool
        self.processes = processes
        plan = launch.Launch(
            num_nodes=num_nodes,
            node_rank=node_rank,
            processes=processes,
            master_addr="127.0.0.1",
            master_port=port,
            interface="lo",
            spool=spool,
            threads=1,
            start_timeout_s=start_timeout_s,
            collective_timeout_s=collective_timeout_s,
            ranks=ranks,
        )
        self.log = (spool.parent / f"{spool.name}.log").open("w+")
        self.agent = subprocess.Popen(
            forked(launch.argv(plan)),
            env=os.environ | launch.environment(plan),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def groups(self) -> list[int]:
        """The process groups that the spool names."""
        return [int(name) for name in os.listdir(self.spool / "pgid")]

    def wait_outcome(self, number: int) -> None:
        """Until this node's ranks have done request `number`; raises TrainerFailed."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while launch.outcome(self.spool, number, self.processes) is None:
            assert self.agent.poll() is None, f"torchrun exited with {self.agent.returncode}: {self.output()}"
            assert time.monotonic() < deadline, f"request {number} was not done in time: {self.output()}"
            time.sleep(0.01)

    def wait_groups(self, count: int) -> list[int]:
        """Until `count` trainers have registered."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while len(self.groups()) < count:
            assert time.monotonic() < deadline, f"no {count} trainers in time: {self.output()}"
            time.sleep(0.01)
        return self.groups()

    def output(self) -> str:
        """What the job has printed so far."""
        self.log.flush()
        return Path(self.log.name).read_text()

    def kill(self) -> None:
        """End every process of the job."""
        if self.agent.poll() is None:
            os.killpg(self.agent.pid, signal.SIGKILL)
        self.agent.wait(JOB_TIMEOUT_S)
        for group in self.groups():
            if group_members(group):
                os.killpg(group, signal.SIGKILL)
        self.log.close()


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            continue
    return members


def result_of(request: TrainRequest) -> TrainResult:
    """The result that a training phase left."""
    return TrainResult.from_json((Path(request.staging_dir) / "result.json").read_bytes())
