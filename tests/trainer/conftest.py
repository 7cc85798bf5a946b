"""What the trainer's tests share: a model with random weights, batches, requests, training jobs."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engines.model_dir import policy_digest
from rollout.storage.hashing import checksums
from rollout.trajectory import Group, Sample
from tests.ports import unused_port
from tests.trainer.training_jobs import Node
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.documents import TrainRequest
from trainer.model import tiny
from trainer.settings import TrainerSettings


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that spin for one another cost more than they give on a model this small."""
    torch.set_num_threads(1)


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
    """A group with random trajectories of 4 to 24 tokens, three of them the prompt; one for each reward."""
    samples = []
    prompt = np.random.default_rng(slot).integers(3, 90, 3)
    for reward in rewards:
        tokens = int(rng.integers(4, 25))
        mask = (np.arange(tokens) >= len(prompt)).astype(np.uint8)
        samples.append(
            Sample(
                token_ids=np.concatenate([prompt, rng.integers(3, 90, tokens)[3:]]).astype(np.int32),
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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests have hashed is remembered apart from what the user has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
            model_dir=str(base_dir),
            model_name=str(base_dir),
            base_policy=policy_digest(checksums(base)),
            staging_dir=str(staging_dir),
            rank_weights=tuple(rank_weights),
            seed=0,
            settings=settings,
            max_tokens=32,
        )

    return make


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a node of a job, a job of one node by default; all of it is gone after the test."""
    nodes: list[Node] = []

    def start(processes: int, port: int = 0, num_nodes: int = 1, node_rank: int = 0, **launch: Any) -> Node:
        spool = tmp_path / f"spool_{len(nodes)}"
        nodes.append(Node(spool, port or unused_port(), num_nodes, node_rank, processes, **launch))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


@pytest.fixture
def groups(group: Callable[..., Group]) -> list[Group]:
    rng = np.random.default_rng(0)
    return [
        group(0, [1.0, 0.0, 1.0], rng),
        group(1, [1.0, 1.0, 1.0], rng),
        group(2, [1.0, None, 0.0], rng),
        Group(3, "task-3", "1+1=", [], given_up="timeout"),
        group(4, [None, 1.0], rng),
    ]
