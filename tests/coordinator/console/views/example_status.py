"""The status of made-up nodes, as `run status --json` prints it."""

import threading
from pathlib import Path
from typing import Any

from coordinator.directory.layout import RunDir

ROOT = Path("/shared/exp1")


def node(rank: int, **said: Any) -> dict[str, Any]:
    return {
        "crew": "main", "rank": rank, "name": f"rank {rank}",
        "host": f"node-{rank}", "address": "", "state": "alive", "iteration": 5,
        "phase": "train_rollout", "row_s": 12.0, "waiting_s": 0.0, "weight": 1.0, "tasks_assigned": 64,
        "tasks_done": 16, "samples_assigned": 0, "samples_done": 0,
        "tokens_per_s": None, "left_s": None, "gpu_count": 0, "gpus": [], "silent_s": 0.4,
        **said,
    }  # fmt: skip


def status(*nodes: dict[str, Any], **said: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run_id": "abc", "state": "running", "epoch": 2, "iteration": 5, "iterations": 16,
        "phase": "train_rollout", "waiting_for": [], "waits_for": "", "work": "", "work_s": 0.0,
        "waiting_s": 0.0, "left_s": None, "ending": "", "num_nodes": len(nodes), "nodes": list(nodes),
        "last_metrics": None, **said,
    }  # fmt: skip
    return {**found, "crews": [{"crew": "main", **found}]}


class Readings:
    """In place of a run directory: it hangs while `hangs`, and shows `status`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.run_dir = RunDir(ROOT)
        self.error: Exception | None = None
        self.status = status(node(0), node(1))
        self.answers = threading.Event()
        self.answers.set()
        self.under_way = self.most = 0

    def __call__(self, _root: Path) -> "Readings":
        return self

    def read(self) -> dict[str, Any]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.answers.wait()
        self.under_way -= 1
        if self.error:
            raise self.error
        return self.status
