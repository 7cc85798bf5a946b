"""The kill matrix: a node is killed at the flag of each row and restarted; the run ends as if undisturbed.

`dying_node` says what `before` and `after` a flag mean. Half of the killed nodes are restarted at once, the
other half when the survivor has found them lost.

At each row one of the nodes is killed before its flag and the other one after it; `make test-matrix` has the
other half too: each run imports torch four times or more, which is minutes of a small machine.
"""

import os
import signal
from typing import Any

import pytest

from coordinator.epochs import MASTER
from coordinator.phases import Phase
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.faults import durable_parts, lost_groups, repeated_groups, unsound_manifests
from tests.cluster.small_run import ITERATIONS, arguments, results

WORKER = 1
Results = list[dict[str, Any]]

MATRIX = [
    pytest.param(phase, victim, when, id=f"{phase.label}-{'worker' if victim else 'master'}-{when}")
    for phase in Phase
    for victim in (MASTER, WORKER)
    for when in ("before", "after")
    if os.environ.get("FLAGPOST_MATRIX") == "whole" or (phase // 2 + victim + (when == "after")) % 2 == 0
]


def start_dying(cluster: Cluster, engine_urls: list[str], dying: dict[int, tuple[Phase, str]]) -> None:
    """Start both nodes and wait until those of `dying` have been killed at their places."""
    for rank in (MASTER, WORKER):
        program = ["coordinator.cli"]
        if rank in dying:
            phase, when = dying[rank]
            program = ["tests.cluster.dying_node", phase.label, when, "KILL"]
        cluster.start(rank, *arguments(rank, engine_urls), program=program)
    for rank in dying:
        cluster.until(
            lambda rank=rank: cluster.nodes[rank].poll() is not None, f"the end of rank {rank}", 120
        )
        assert cluster.nodes[rank].returncode == -signal.SIGKILL, cluster.everything_said()


def wait_until_lost(cluster: Cluster, victim: int) -> None:
    """Wait until the survivor says that the victim is lost."""
    survivor = WORKER if victim == MASTER else MASTER
    lost = f"rank {victim} ("
    cluster.until(
        lambda: any(lost in line and "is lost" in line for line in cluster.output(survivor).splitlines()),
        f"rank {survivor} finds rank {victim} lost",
    )


@pytest.mark.parametrize(("phase", "victim", "when"), MATRIX)
def test_killed_node_comes_back_and_the_run_ends_as_if_undisturbed(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results, phase: Phase, victim: int, when: str
) -> None:
    start_dying(cluster, engine_urls, {victim: (phase, when)})
    kept = durable_parts(cluster.run_dir)
    assert bool(kept) == (phase >= Phase.TRAIN_ROLLOUT)
    if (phase + victim + (when == "after")) % 2:
        wait_until_lost(cluster, victim)

    cluster.start(victim, *arguments(victim, engine_urls))
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert lost_groups(cluster.run_dir, kept) == []
    assert repeated_groups(cluster.run_dir) == []
    assert unsound_manifests(cluster.run_dir) == []
    assert results(cluster) == undisturbed


@pytest.mark.parametrize("phase", [Phase.TRAIN_ROLLOUT, Phase.TRAINING])
def test_both_nodes_killed_at_once_come_back(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results, phase: Phase
) -> None:
    start_dying(cluster, engine_urls, {MASTER: (phase, "before"), WORKER: (phase, "after")})
    kept = durable_parts(cluster.run_dir)
    for rank in (MASTER, WORKER):
        cluster.start(rank, *arguments(rank, engine_urls))
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert kept and lost_groups(cluster.run_dir, kept) == repeated_groups(cluster.run_dir) == []
    assert results(cluster) == undisturbed


@pytest.mark.parametrize("dead", [(0, 2), (0, 1, 2)])
def test_nodes_killed_in_mid_rollout_come_back(
    cluster: Cluster, engine_url: str, dead: tuple[int, ...]
) -> None:
    settings = [*FAST, "rollout.tasks_per_iteration=24", "rollout.concurrency=4", "cluster.node_timeout_s=4"]
    settings += ["rollout.environment=tests.cluster.plugins:slow", "--rl-phase", "rollout"]
    master = ["--num-nodes", "3", "--iterations", "1", "--engine-url", engine_url, *settings]
    cluster.start(0, *master)
    for rank in (1, 2):
        cluster.start(rank)
    cluster.until(lambda: len(durable_parts(cluster.run_dir)) >= 3, "the first parts")
    for rank in dead:
        cluster.kill(rank)
    for rank in dead:
        cluster.nodes[rank].wait()
    kept = durable_parts(cluster.run_dir)
    assert not cluster.run_dir.manifest("train", 1).exists(), "the rollout was still going on"
    for rank in dead:
        cluster.start(rank, *([] if rank else master))
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    assert lost_groups(cluster.run_dir, kept) == repeated_groups(cluster.run_dir) == []
    assert sorted(cluster.groups(1)) == list(range(24))
