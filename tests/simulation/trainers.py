"""Trainers without torch: each is a process of its own, and all of a job have to take part."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout.engines.model_dir import PROBE, policy_digest
from rollout.storage import delta
from rollout.storage.hashing import FileFacts, checksums, facts_of
from tests.simulation.disk import Disk
from tests.simulation.engines import logprobs_of
from tests.simulation.scheduler import Scheduler
from trainer.batch.batch import Batch
from trainer.documents import TrainRequest, TrainResult
from trainer.job import launch

PEER_DIED_S = 6.0
"""How long it takes until the agents of a job notice that a peer of theirs has died."""
PROBE_TOKENS = [5, 6, 7, 8]


@dataclass(eq=False)
class Job:
    """A training job: who has joined (and whether it lives), and what each was asked for in each phase."""

    members: dict[int, Callable[[], bool]] = field(default_factory=dict)
    asked: dict[int, dict[int, TrainRequest]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def is_broken(self) -> bool:
        return not all(lives() for lives in self.members.values())


class _PeerDied(Exception):
    """The job cannot go on."""


class Trainer:
    """One node's part of a job: takes seconds; node rank 0 writes the checkpoint."""

    def __init__(
        self,
        scheduler: Scheduler,
        disk: Disk,
        jobs: dict[str, Job],
        job: launch.Launch,
        lives: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._disk = disk
        self._launch = job
        self._lives = lives
        self._job = jobs.setdefault(f"{job.master_addr}:{job.master_port}", Job())

    def run(self) -> int:
        number = 0
        try:
            self._wait(self._scheduler.random.uniform(0.2, 1.5))
            self._job.members[self._launch.node_rank] = self._lives
            self._until(lambda: len(self._job.members) == self._launch.num_nodes)
            while True:
                number, data = launch.next_request(self._launch.spool, number)
                self._train(number, TrainRequest.from_json(data))
                launch.report_done(self._launch.spool, number, 0)
        except (_PeerDied, FileNotFoundError) as error:
            launch.report_failure(self._launch.spool, number, 0, f"connection closed by peer: {error!r}")
            return 1

    def _train(self, number: int, request: TrainRequest) -> None:
        asked = self._job.asked.setdefault(number, {})
        asked[self._launch.node_rank] = request
        own = {"base_dir", "model_dir", "copy_dir"}  # each node may have copies
        if any(other.model_dump(exclude=own) != request.model_dump(exclude=own) for other in asked.values()):
            self._scheduler.violate(f"ranks of one job were asked for different things: {asked}")
        self._until(lambda: len(asked) == self._launch.num_nodes)
        self._wait(self._scheduler.random.uniform(0.5, 4.0))
        if self._job.is_broken():
            self._fail()
        files = self._files(request)
        if request.ahead:
            self._copy(number, request, files)
        if self._launch.node_rank == 0:
            self._write(request, files)
            self._job.done.add(number)
        self._until(lambda: number in self._job.done)

    def _files(self, request: TrainRequest) -> dict[str, bytes]:
        """The model that engines load."""
        base = policy_digest(checksums(Path(request.base_dir)))
        if base != request.base_policy:
            self._scheduler.violate(f"{request.base_dir} holds {base}, asked for {request.base_policy}")
        weights = f"weights after {base} and {self._content(request)}".encode()
        facts = {"model.safetensors": facts_of(weights)}
        probe = {"token_ids": PROBE_TOKENS, "logprobs": logprobs_of(PROBE_TOKENS, policy_digest(facts))}
        return {"model.safetensors": weights, "config.json": b"{}", PROBE: json.dumps(probe).encode()}

    def _copy(self, number: int, request: TrainRequest, files: Mapping[str, bytes]) -> None:
        """Give the node a copy before the checkpoint is there."""
        copy: dict[str, FileFacts] | None = None
        if request.copy_dir is not None:
            for name, content in files.items():
                (Path(request.copy_dir) / name).write_bytes(content)
                self._wait(self._scheduler.random.uniform(0.0, 0.5))
            copy = {name: facts_of(content) for name, content in files.items()}
        launch.report_copied(self._launch.spool, number, 0, copy)

    def _write(self, request: TrainRequest, model: Mapping[str, bytes]) -> None:
        disk, staging = self._disk, Path(request.staging_dir)
        if left := disk.listdir(staging):
            self._scheduler.violate(f"{staging} must be empty, but holds {left}")
        disk.mkdir(staging / "trainer_state")
        weights = model["model.safetensors"]
        files = {**model, "trainer_state/optimizer": b"moments"}
        old = (Path(request.base_dir) / "model.safetensors").read_bytes()
        if request.delta and (change := delta.encode([old], [weights], worth=10.0)) is not None:
            files[delta.delta_name("model.safetensors")] = change
        facts: dict[str, FileFacts] = {}
        for name, content in files.items():
            self._publish(staging / name, content)
            path = staging / name
            facts[name] = FileFacts(**checksums(path.parent)[path.name])
            self._wait(self._scheduler.random.uniform(0.0, 1.0))
        policy = policy_digest(checksums(staging))
        result = TrainResult(
            iteration=request.iteration,
            policy=policy,
            base_policy=request.base_policy,
            batch_sha256=request.batch_sha256,
            files=facts,
            steps=1,
            optimizer_step=request.iteration,
            settings=request.settings,
            max_tokens=request.max_tokens,
            metrics={"loss": 0.5},
        )
        self._publish(staging / "result.json", result.to_json())

    def _content(self, request: TrainRequest) -> str:
        """A digest of what there is to learn, which is the same whichever nodes made it."""
        data = Path(request.batch_file).read_bytes()
        if hashlib.sha256(data).hexdigest() != request.batch_sha256:
            self._scheduler.violate(f"{request.batch_file} is not the batch that training was asked for")
        batch = Batch.decode(data)
        arrays = (batch.slots, batch.offsets, batch.token_ids, batch.advantages)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    def _publish(self, path: Path, content: bytes) -> None:
        temp = path.with_name(f".{path.name}.tmp")
        self._disk.enter()
        temp.write_bytes(content)
        self._disk.replace(temp, path)

    def _until(self, ready: Callable[[], bool]) -> None:
        waited_s = 0.0
        while not ready():
            if self._job.is_broken() or waited_s > self._launch.start_timeout_s:
                self._fail()
            self._wait(0.2)
            waited_s += 0.2

    def _fail(self) -> None:
        self._wait(PEER_DIED_S)
        raise _PeerDied("another node of the job has gone")

    def _wait(self, seconds: float) -> None:
        self._scheduler.wait(seconds)
