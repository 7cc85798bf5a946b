"""A made-up run for the commands of the documentation: some iterations finished, the next one interrupted."""

import json
from pathlib import Path

from coordinator.directory import manifests
from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.parts import PartWriter
from coordinator.protocol.records import claim
from coordinator.settings.loading import build
from rollout.quota import Quota
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

SETTINGS = build({"cluster.num_nodes": 3, "cluster.beat_s": 0.01, "iterations": 100})
SLOTS = 4


def make_run(root: Path, finished: int) -> RunDir:
    """A run of three nodes; `finished` iterations are over, the first and the last with trajectories and a
    checkpoint, and the one after it has come as far as its first parts.
    """
    run_dir = run_dir_at(root)
    fixed = {"model": {"name": "some/model", "digest": "ba5e"}, "tasks": {"name": "sums.jsonl"}}
    write_json(run_dir.run_json, {"run_id": "c0ffee", "format": FORMAT, "fixed": fixed})
    for epoch, kind in ((1, "lobby"), (2, "full")):
        claim(run_dir, record(epoch, kind, settings=SETTINGS))  # pyright: ignore
    for rank in range(3):
        said = {
            "host": f"node-{rank}",
            "pid": 4711 + rank,
            "peer": {"identity": "elsewhere", "addresses": []},
        }
        where = {
            "state": "running",
            "iteration": finished + 1,
            "phase": "train_rollout",
            "done": 1,
            "total": 2,
        }
        said |= {"address": f"10.0.0.{rank}", "processes": 1, "waiting_for": [], **where}
        write_json(run_dir.entry(Beat(2, rank, 1, 5)), said)
        say(run_dir, rank)
    write_json(run_dir.entry(Flag(2, finished + 1, 1, 0, "ok")), {})
    lines = [metrics_line(iteration) for iteration in range(1, finished + 1)]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    policy = POLICY
    for iteration in sorted({1, finished} - {0}):
        roll_out(run_dir, iteration, policy, SLOTS)
        policy = write_checkpoint(run_dir.checkpoint(iteration), iteration).policy
    roll_out(run_dir, finished + 1, policy, SLOTS // 2)
    return run_dir


def metrics_line(iteration: int) -> dict[str, object]:
    """What the master writes at the end of an iteration, as far as people look at it."""
    line = {"iteration": iteration, "kind": "both", "reward": 0.4 + 0.01 * iteration, "samples": 8}
    figures = {
        "eval_reward": None,
        "seconds": 10.0,
        "tokens_per_s": 100.0,
        "kl_engine": 0.001,
        "entropy": 1.0,
    }
    phases = {"phase_seconds": {"train_rollout": 6.0, "training": 3.0}, "busy_fraction": 0.9}
    return {**line, **figures, **phases, "wait_seconds": {"0": 0.5, "1": 1.0, "2": 1.0}}


def roll_out(run_dir: RunDir, iteration: int, policy: str, finished: int) -> None:
    """Parts with the first `finished` groups of an iteration; its manifest if these are all."""
    write_json(run_dir.iteration_json(iteration), opened(iteration, origin(policy), SLOTS))
    writer = PartWriter(run_dir, "train", iteration, 0, 2, origin(policy))
    for slot in range(finished):
        writer.add(group(slot))
    writer.flush()
    if finished == SLOTS:
        directory = run_dir.trajectories("train", iteration)
        document, groups = manifests.manifest(directory, iteration, Quota(SLOTS, SLOTS), origin(policy))
        manifests.publish_manifest(run_dir.manifest("train", iteration), document, groups)


def say(run_dir: RunDir, rank: int) -> None:
    """A log and the events of a process."""
    logs = run_dir.logs(rank)
    logs.mkdir(parents=True)
    (logs / "node.4711.log").write_text(
        f"2026-11-21 21:40:03 [rank {rank}] 3 nodes take part (cluster epoch 2)\n"
    )
    about = {"host": f"node-{rank}", "pid": 4711, "at": "2026-11-21T21:40:00+00:00", "weight": 1.0}
    versions = {
        "flagpost": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "vllm": None,
        "transformers": "5.19",
    }
    events = [
        {"what": "process", "rank": rank, **about, "gpus": [], "versions": versions},
        {"what": "epoch", "members": [0, 1, 2]},
        {"what": "begin", "it": 1, "row": "train_rollout"},
        {"what": "end", "it": 1, "row": "train_rollout", "work_s": 5.0 + rank},
    ]
    path = run_dir.root / "events" / f"rank_{rank:04d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    marks = [{"t": 100.0 + 3 * number, "n": 1, "e": 2} for number in range(len(events))]
    path.write_text(
        "".join(f"{json.dumps(mark | event)}\n" for mark, event in zip(marks, events, strict=True))
    )
