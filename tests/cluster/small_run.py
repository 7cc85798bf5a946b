"""The run that is disturbed in every way: two nodes, and hardly any work beside starting processes."""

import json
from typing import Any

from tests.cluster.cluster import FAST, Cluster, token_ids

ITERATIONS = 2
"""Faults come in the first; the second starts from what came of it."""
NODE_TIMEOUT_S = 4.0
SETTINGS = (
    *FAST,
    "rollout.tasks_per_iteration=4",
    "rollout.samples_per_task=4",
    "eval.interval=1",
    "eval.max_tasks=2",
    "trainer.global_batch_size=8",
    "trainer.threads_per_process=1",
    f"cluster.node_timeout_s={NODE_TIMEOUT_S}",
)


def arguments(rank: int, engine_urls: list[str], *more: str) -> list[str]:
    """What a node is started with, the first time and again; `more` is for the master."""
    engine = ["--engine-url", engine_urls[rank]]
    return (
        engine if rank else ["--num-nodes", "2", "--iterations", str(ITERATIONS), *SETTINGS, *engine, *more]
    )


def results(cluster: Cluster) -> list[dict[str, Any]]:
    """What each iteration made, as JSON has it: the token ids of every slot, and the policy."""
    made = [
        {
            "train": token_ids(cluster.groups(iteration)),
            "eval": token_ids(cluster.groups(iteration, "eval")),
            "checkpoint": json.loads((cluster.run_dir.checkpoint(iteration) / "result.json").read_text())[
                "files"
            ],
        }
        for iteration in range(1, ITERATIONS + 1)
    ]
    return json.loads(json.dumps(made))
