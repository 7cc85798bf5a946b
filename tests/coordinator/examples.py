"""Made-up runs for the tests of the coordinator: records, boards, groups, outputs on disk."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coordinator.directory.file_names import Beat, Flag, Record
from coordinator.directory.layout import RunDir
from coordinator.protocol.records import EpochRecord, Member
from coordinator.protocol.snapshot import Board, parse
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings
from rollout.engines.model_dir import CONTENT, PROBE, policy_digest
from rollout.origin import Code, Origin, Sampling, origin_document
from rollout.storage import delta
from rollout.storage.hashing import FileFacts, checksums
from rollout.trajectory import Group, Sample
from trainer.documents import TrainResult
from trainer.settings import TrainerSettings

POLICY = "0123456789abcdef"
ORIGIN = Origin(
    POLICY, 0, Sampling(n=2, max_tokens=8), Code("exact", "e" * 16), Code("single_turn", "5" * 16)
)
"""What made-up samples are made with."""


def origin(policy: str, policy_iteration: int = 0, **sampling: Any) -> Origin:
    """The same with another policy, and maybe other sampling."""
    return replace(
        ORIGIN,
        policy=policy,
        policy_iteration=policy_iteration,
        sampling=replace(ORIGIN.sampling, **sampling),
    )


def opened(iteration: int, origin: Origin, slots: int, **more: Any) -> dict[str, Any]:
    """The iteration.json of an iteration of `slots` slots, in which nothing is evaluated."""
    needed = {"tasks": list(range(slots)), "groups": slots, "replace_flat": False, "eval_slots": 0}
    made_with = {
        **origin_document(origin),
        "eval_sampling": origin_document(replace(origin.sampling, temperature=0.0)),
    }
    return {"iteration": iteration, **made_with, **needed, "eval_tasks": None, **more}


def run_dir_at(root: Path) -> RunDir:
    """A run directory as the master makes it, without run.json."""
    run_dir = RunDir(root)
    for directory in run_dir.fixed_directories:
        directory.mkdir(parents=True)
    return run_dir


def member(incarnation: int = 1, weight: float = 1.0) -> Member:
    return Member(
        incarnation=incarnation, host="node", address="10.0.0.1", processes=1, weight=weight
    )  # fmt: skip


def record(
    epoch: int = 2,
    kind: Literal["lobby", "full", "finished"] = "full",
    members: Mapping[int, int] | None = None,
    master_incarnation: int = 1,
    settings: RunSettings | None = None,
    token: str = "t",
) -> EpochRecord:
    """An epoch record; `members` maps ranks to incarnations, by default 0, 1 and 2 to 1."""
    incarnations = {0: 1, 1: 1, 2: 1} if members is None else members
    return EpochRecord(
        epoch=epoch,
        kind=kind,
        token=token,
        run_id="made-up",
        master_incarnation=master_incarnation,
        master_host="node-a",
        settings=(settings or build({"cluster.num_nodes": 3})).model_dump(mode="json"),
        members={rank: member(incarnation) for rank, incarnation in incarnations.items()},
    )


def board(*entries: Beat | Flag | Record) -> Board:
    return parse(entry.name for entry in entries)


def group(slot: int, rewards: Iterable[float] = (1.0, 0.0), mark: int = 7) -> Group:
    """A group of two prompt tokens and three trained ones a sample; `mark` is the first trained token."""
    samples = [
        Sample(
            token_ids=np.array([1, 2, mark, 4, 5], dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
            logprobs=np.array([0, 0, -1, -1, -1], dtype=np.float32),
            finish_reason="stop" if reward > 0 else "length",
            text="abc",
            reward=reward,
        )
        for reward in rewards
    ]
    return Group(slot=slot, task_id=f"task-{slot}", prompt="1+2=", samples=samples)


def tombstone(slot: int) -> Group:
    return Group(slot=slot, task_id=f"task-{slot}", prompt="1+2=", samples=[], given_up="it took too long")


def write_checkpoint(
    directory: Path, iteration: int = 1, content: bytes = b"weights", before: Path | None = None
) -> TrainResult:
    """A directory that looks like a checkpoint: a few files and the result that names them. `before`: the
    checkpoint from which this one was trained, with a delta to it.
    """
    (directory / "trainer_state").mkdir(parents=True)
    if before is not None:
        change = delta.encode([(before / "model.safetensors").read_bytes()], [content], worth=100.0)
        assert change is not None
        (directory / delta.delta_name("model.safetensors")).write_bytes(change)
    for name in (CONTENT, PROBE):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    (directory / "config.json").write_text("{}")
    (directory / "trainer_state" / "optimizer.safetensors").write_bytes(b"moments")
    files = {name: FileFacts(**facts) for name, facts in checksums(directory).items()}
    state = checksums(directory / "trainer_state")
    result = TrainResult(
        iteration=iteration,
        policy=policy_digest(checksums(directory)),
        base_policy=POLICY if before is None else policy_digest(checksums(before)),
        batch_sha256="0" * 64,
        files=files | {f"trainer_state/{name}": FileFacts(**facts) for name, facts in state.items()},
        steps=1,
        optimizer_step=1,
        settings=TrainerSettings(),
        max_tokens=8,
        metrics={"loss": 0.5},
    )
    (directory / "result.json").write_bytes(result.to_json())
    return result


def write_json(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def tree(root: Path) -> set[str]:
    """Every path below `root`."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}
