"""Groups made while a checkpoint becomes durable, by real nodes on a slow filesystem that are killed then."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, token_ids
from tests.cluster.faults import repeated_groups, taken_over, unsound_manifests
from tests.cluster.small_run import SETTINGS
from tests.faultfs import FaultFs, unavailable

ITERATIONS = 3
GIVEN = (
    "--num-nodes",
    "2",
    "--iterations",
    f"{ITERATIONS}",
    *SETTINGS,
    "eval.interval=0",
    "checkpoints.keep_every=1",
)


def made(cluster: Cluster) -> list[Any]:
    """What each iteration came to: the token ids of every slot, and the policy."""
    checkpoints = [cluster.run_dir.checkpoint(k) / "result.json" for k in range(1, ITERATIONS + 1)]
    policies = [json.loads(path.read_text())["policy"] for path in checkpoints]
    return [(token_ids(cluster.groups(k)), policy) for k, policy in enumerate(policies, start=1)]


@pytest.fixture
def cluster(tmp_path: Path, cache: Path) -> Iterator[Cluster]:
    """Nodes whose run directory is on a mount where each call takes a few milliseconds."""
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 1) as shared:
        nodes = Cluster(shared[0].path / "run", cache, tmp_path)
        shared.set(latency_s=0.004)
        try:
            yield nodes
        finally:
            nodes.close()


def test_nodes_killed_in_their_head_start_come_back_and_the_run_ends_as_without_one(
    tmp_path: Path, cache: Path, cluster: Cluster
) -> None:
    calm = Cluster(tmp_path / "calm", cache, tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    try:
        assert calm.run(2, *GIVEN, "checkpoints.head_start=false") == [0, 0], calm.everything_said()
        expected = made(calm)
        assert not taken_over(calm.run_dir, 0)
    finally:
        calm.close()
    kills = [(1, 1, "first"), (0, 2, "last")]
    programs = {rank: [kill for kill in kills if kill[0] == rank] for rank in (0, 1)}

    def start(rank: int) -> None:
        program = ["coordinator.cli"]
        if programs[rank]:
            _, iteration, when = programs[rank].pop(0)
            program = ["tests.cluster.ahead_node", f"{iteration}", when]
        cluster.start(rank, *(() if rank else GIVEN), program=program)

    for rank in (0, 1):
        start(rank)
    for rank, iteration, _ in kills:
        cluster.until(
            lambda rank=rank: cluster.nodes[rank].poll() is not None, f"the end of rank {rank}", 120
        )
        assert cluster.nodes[rank].returncode == -9, cluster.everything_said()
        names = {path.name for path in cluster.run_dir.checkpoints.iterdir()}
        assert f"iteration_{iteration:06d}" not in names
        assert not cluster.run_dir.trajectories("train", iteration + 1).exists()
        start(rank)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert made(cluster) == expected
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert repeated_groups(cluster.run_dir) == [] and unsound_manifests(cluster.run_dir) == []
    begun = [taken_over(cluster.run_dir, rank) for rank in (0, 1)]  # 1 and 2 were trained again
    # On a busy machine the policy may be there before a sample of its iteration has been begun.
    assert sum(by.get(iteration, 0) for by in begun for iteration in (2, 3)) > 0, begun
