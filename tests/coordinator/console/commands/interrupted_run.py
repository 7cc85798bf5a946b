"""A run that was interrupted in its second iteration, for `run cleanup`."""

import json
from pathlib import Path

import pytest

from coordinator.console.commands.cleanup import cleanup
from coordinator.directory import manifests
from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.parts import PartWriter
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.records import GivenSettings, claim
from coordinator.settings.loading import build
from rollout.quota import Quota
from rollout.trajectory import Group
from tests.coordinator.examples import (
    POLICY,
    group,
    opened,
    origin,
    record,
    run_dir_at,
    write_checkpoint,
    write_json,
)

GIVEN = GivenSettings(host="node", settings={"cluster.num_nodes": 2, "cluster.beat_s": 0.01})
SETTINGS = build({"cluster.num_nodes": 2, "cluster.beat_s": 0.01})
N = 2
"""The interrupted iteration; 1 is finished."""


def interrupted_run(root: Path) -> RunDir:
    """A run whose nodes were killed in the training of iteration 2, epoch 3; iteration 1 is finished."""
    made = run_dir_at(root)
    write_json(made.run_json, {"run_id": "made-up", "format": FORMAT, "fixed": {}})
    made.metrics.write_text(json.dumps({"iteration": 1, "kind": "both"}) + "\n")
    for epoch, kind in [(1, "lobby"), (2, "full"), (3, "full")]:
        begun = record(epoch, kind, {0: 1, 1: 1}, settings=SETTINGS)  # pyright: ignore
        assert claim(made, begun.model_copy(update={"given": GIVEN}))
    for rank in (0, 1):
        beat(made, rank)
    for flag in (Flag(2, 0, 0, 1, "enter"), Flag(2, 1, 4, 0, "ok"), Flag(3, 2, 4, 0, "ok")):
        write_json(made.entry(flag), {})
    iteration_of(made, 1, POLICY)
    iteration_of(made, N, write_checkpoint(made.checkpoint(1)).policy)
    made.latest.write_text("iteration_000001\n")
    write_checkpoint(made.staging(N, 3), N)
    for epoch in (2, 3):
        write_json(made.trainer_state(epoch - 1, epoch) / "state.json", {})
    for trash in (f".{made.latest.name}.0011aabb.tmp", f"{made.staging(N, 2).name}.damaged/x", ".nfs00"):
        (made.checkpoints / trash).parent.mkdir(exist_ok=True)
        (made.checkpoints / trash).write_text("x")
    made.images.mkdir()
    for picture in ("ab" * 32, f".{'ab' * 32}.0011aabb.tmp"):
        (made.images / picture).write_text("x")
    return made


def beat(run_dir: RunDir, rank: int, incarnation: int = 1, counter: int = 5, epoch: int = 3) -> None:
    content = {"host": f"node-{rank}", "pid": 4711 + rank, "peer": {"identity": "elsewhere"}}
    write_json(run_dir.entry(Beat(epoch, rank, incarnation, counter)), content)


def iteration_of(run_dir: RunDir, iteration: int, policy: str) -> None:
    """The trajectories, manifest and batch of an iteration of four slots."""
    write_json(run_dir.iteration_json(iteration), opened(iteration, origin(policy), slots=4))
    for rank in (0, 1):
        write_parts(run_dir, iteration, rank, 2, [group(2 * rank), group(2 * rank + 1)])
    directory = run_dir.trajectories("train", iteration)
    document, groups = manifests.manifest(directory, iteration, Quota(4, 4), origin(policy))
    manifests.publish_manifest(run_dir.manifest("train", iteration), document, groups)
    write_json(run_dir.batch(iteration) / "batch.json", {})
    (run_dir.batch(iteration) / "batch.safetensors").write_bytes(b"batch")
    write_json(run_dir.manifest("eval", iteration), {"policy": POLICY})


def write_parts(run_dir: RunDir, iteration: int, rank: int, epoch: int, groups: list[Group]) -> None:
    policy = json.loads(run_dir.iteration_json(iteration).read_text())["policy"]
    writer = PartWriter(run_dir, "train", iteration, rank, epoch, origin(policy))
    for each in groups:
        writer.add(each)
    writer.flush()


def mid_rollout(run_dir: RunDir, *groups: Group) -> None:
    """Take iteration N back to its rollout, with these groups finished, in one part of rank 1."""
    for path in (run_dir.manifest("train", N), run_dir.staging(N, 3) / "result.json"):
        path.unlink()
    train = run_dir.trajectories("train", N)
    for path in train.glob("r*"):
        path.unlink()
    if groups:
        write_parts(run_dir, N, 1, 3, list(groups))


def everything(root: Path) -> dict[str, bytes]:
    """Every file below `root`, with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(run_dir: RunDir, **how: bool) -> str:
    """What a cleanup says that refuses with exit code 1."""
    with pytest.raises(NodeEnded) as end:
        cleanup(run_dir.root, N, **how)
    assert end.value.code is Exit.FAILED and "\n" not in end.value.text
    return end.value.text
