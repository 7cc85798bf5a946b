"""What the trainer's tests share: a model with random weights, batches, and real training jobs."""

import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rollout.trajectory import Group, Sample
from rollout.weights import file_checksums, policy_digest
from trainer import launch, tiny
from trainer.batch import Batch, build_batch
from trainer.request import TrainRequest, TrainResult
from trainer.settings import TrainerSettings

JOB_TIMEOUT_S = 90.0


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """builtin:tiny without its warm-up. Read-only."""
    out = tmp_path_factory.mktemp("model") / "tiny"
    tiny.build(seed=0, steps=0, out=out)
    return out


@pytest.fixture(scope="session")
def settings() -> TrainerSettings:
    """Three optimizer steps for `batch`, several microbatches each."""
    return TrainerSettings(
        learning_rate=1e-3, warmup_steps=2, global_batch_size=16, max_tokens_per_microbatch=64
    )


def make_group(slot: int, rewards: Sequence[float | None], rng: np.random.Generator) -> Group:
    """A group with random trajectories of 4 to 24 tokens, one for each reward."""
    samples = []
    for reward in rewards:
        tokens, prompt = int(rng.integers(4, 25)), 3
        mask = (np.arange(tokens) >= prompt).astype(np.uint8)
        samples.append(
            Sample(
                token_ids=rng.integers(3, 90, tokens).astype(np.int32),
                loss_mask=mask,
                logprobs=(mask * rng.uniform(-5, -4, tokens)).astype(np.float32),
                finish_reason="length" if tokens % 2 else "stop",
                text="",
                reward=reward,
            )
        )
    return Group(slot, f"task-{slot}", "1+1=", samples)


@pytest.fixture(scope="session")
def group() -> Callable[..., Group]:
    """make_group"""
    return make_group


@pytest.fixture(scope="session")
def batch() -> Batch:
    """48 sequences of 12 groups."""
    rng = np.random.default_rng(1)
    groups = [make_group(slot, [0.0, 1.0, 1.0, 0.5], rng) for slot in range(12)]
    return build_batch(groups, manifest_sha256="m", policy="p", temperature=1.0, seed=7)


@pytest.fixture
def make_request(tmp_path: Path, base_dir: Path, settings: TrainerSettings) -> Callable[..., TrainRequest]:
    """A request for a batch, with a batch file and an empty staging directory of its own."""
    made = iter(range(1, 100))

    def make(batch: Batch, base: Path = base_dir, rank_weights: Sequence[float] = (1.0,)) -> TrainRequest:
        iteration = next(made)
        staging_dir = tmp_path / f"staging_{iteration}"
        staging_dir.mkdir()
        data = batch.encode()
        batch_file = tmp_path / f"batch_{iteration}.safetensors"
        batch_file.write_bytes(data)
        return TrainRequest(
            iteration=iteration,
            epoch=1,
            batch_file=str(batch_file),
            batch_sha256=hashlib.sha256(data).hexdigest(),
            base_dir=str(base),
            base_policy=policy_digest(file_checksums(base)),
            staging_dir=str(staging_dir),
            rank_weights=tuple(rank_weights),
            seed=0,
            settings=settings,
            temperature=1.0,
        )

    return make


class Node:
    """One node's torchrun agent and spool; `kill` does what a node and its keeper do."""

    def __init__(self, spool: Path, port: int, num_nodes: int, node_rank: int, processes: int) -> None:
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
            start_timeout_s=JOB_TIMEOUT_S,
            collective_timeout_s=JOB_TIMEOUT_S,
        )
        self.log = (spool.parent / f"{spool.name}.log").open("w+")
        self.agent = subprocess.Popen(
            launch.argv(plan),
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


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a node of a job, a job of one node by default; all of it is gone after the test."""
    nodes: list[Node] = []

    def start(processes: int, port: int = 0, num_nodes: int = 1, node_rank: int = 0) -> Node:
        spool = tmp_path / f"spool_{len(nodes)}"
        nodes.append(Node(spool, port or free_port(), num_nodes, node_rank, processes))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


def free_port() -> int:
    """A TCP port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def result_of(request: TrainRequest) -> TrainResult:
    """The result that a training phase left."""
    return TrainResult.from_json((Path(request.staging_dir) / "result.json").read_bytes())
