"""A node's engine or trainer dies, or stands still: the node sees to it; the run ends as if undisturbed."""

import signal
import time
from typing import Any

import psutil

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SEPARATE
from tests.cluster.faults import (
    ENGINE,
    TRAINER_RANK,
    children,
    durable_parts,
    has_ended,
    lost_groups,
    repeated_groups,
)
from tests.cluster.small_run import ITERATIONS, SETTINGS, arguments, results

Results = list[dict[str, Any]]


def the_child(cluster: Cluster, rank: int, kind: str) -> psutil.Process:
    """Wait for a child of a node."""
    pid = cluster.nodes[rank].pid
    return cluster.until(lambda: children(pid, kind), f"rank {rank} has a {kind}", 120)[0]


def test_engine_killed_in_mid_rollout_is_restarted_and_no_finished_group_is_made_again(
    cluster: Cluster, undisturbed: Results
) -> None:
    victim = 1
    slow = ["rollout.environment=tests.cluster.plugins:slow", "rollout.concurrency=4"]
    settings = ["--num-nodes", "2", "--rank-weights", "1,1", "--iterations", str(ITERATIONS)]
    settings += [*SETTINGS, *slow]
    one_by_one = {"SLOW_S": "1.5"}
    cluster.start(0, *settings, variables=one_by_one)
    cluster.start(1, variables=one_by_one)
    directory = cluster.run_dir.trajectories("train", 1)
    part = f"r{victim:04d}.*.safetensors"
    cluster.until(lambda: list(directory.glob(part)), "the victim's first part", 120)
    kept = durable_parts(cluster.run_dir)
    engine = the_child(cluster, victim, ENGINE)
    engine.send_signal(signal.SIGSTOP)
    time.sleep(2.0)  # the next request is in flight now: it was due 1.5 s after the last
    engine.kill()
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert len(list(cluster.run_dir.logs(victim).glob("engine.*.log"))) == 2, "one restart"
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert lost_groups(cluster.run_dir, kept) == repeated_groups(cluster.run_dir) == []
    assert results(cluster) == undisturbed


def test_stuck_trainer_rank_is_another_attempt(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results
) -> None:
    iterations = 8
    limits = [
        "trainer.collective_timeout_s=10",
        "trainer.max_attempts=4",
        f"checkpoints.keep_last={iterations}",
    ]
    cluster.start(0, *arguments(0, engine_urls, *limits, "--iterations", str(iterations)))
    cluster.start(1, *arguments(1, engine_urls))
    cluster.until(lambda: cluster.metrics(), "the first iteration", 120)
    rank = the_child(cluster, 1, TRAINER_RANK)  # which waits for the request of the second
    rank.send_signal(signal.SIGSTOP)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert has_ended(rank)
    assert "attempt 2 of 4" in cluster.output(0)
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, iterations + 1))
    assert repeated_groups(cluster.run_dir) == []
    assert results(cluster) == undisturbed


@SEPARATE
def test_trainer_rank_that_always_dies_ends_the_run_with_its_words(
    cluster: Cluster, engine_urls: list[str]
) -> None:
    cluster.start(0, *arguments(0, engine_urls, "trainer.max_attempts=2"))
    cluster.start(1, *arguments(1, engine_urls))
    for _attempt in range(2):
        rank = the_child(cluster, 1, TRAINER_RANK)
        rank.kill()
        cluster.until(lambda rank=rank: has_ended(rank), "its end")
    assert cluster.wait() == [1, 1], cluster.everything_said()
    last = cluster.output(0).rpartition("error: ")[2]
    assert last.startswith("rank 1 (") and "was ended by SIGKILL, perhaps for lack" in last.splitlines()[0], (
        last
    )
    assert cluster.metrics() == []
