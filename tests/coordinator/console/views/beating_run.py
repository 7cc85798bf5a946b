"""A run of three nodes that beat, from a made-up directory."""

import os
from typing import Any

from coordinator.console.views.run import Run
from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import RunDir
from coordinator.protocol.records import EpochRecord, claim
from coordinator.settings.loading import build
from tests.coordinator.examples import record, write_json

SETTINGS = build({"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "iterations": 8})


def beat(run_dir: RunDir, rank: int, incarnation: int = 1, counter: int = 5, **said: Any) -> None:
    content = {
        "host": f"node-{rank}", "pid": os.getpid(), "pid_space": "elsewhere", "address": f"10.0.0.{rank}",
        "processes": 1, "state": "running", "iteration": 5, "phase": "train_rollout",
        "done": 3 * rank, "total": 64, "waiting_for": [], **said,
    }  # fmt: skip
    write_json(run_dir.entry(Beat(2, rank, incarnation, counter)), content)


def running(run_dir: RunDir, newest: EpochRecord | None = None, **master: Any) -> dict[str, Any]:
    """Three nodes that beat in epoch 2, of which the master says `master`; their status."""
    claim(run_dir, newest or record(2, settings=SETTINGS))
    beat(run_dir, 0, **master)
    beat(run_dir, 1)
    beat(run_dir, 2)
    return Run(run_dir.root).status()


def flag(run_dir: RunDir, rank: int, kind: str, epoch: int = 2) -> None:
    (run_dir.entry(Flag(epoch, 5, 2, rank, kind))).write_text('{"text": "said why"}')


def states(status: dict[str, Any]) -> list[str]:
    return [node["state"] for node in status["nodes"]]


GONE = 2**22 + 1
"""More than any pid."""
