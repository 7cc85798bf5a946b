"""A run of nodes on a shared filesystem, each with a client of its own, some of which are killed."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.machine.children import FORKS, PROGRAMS
from tests.cluster.cluster import FAST, REPOSITORY, Cluster
from tests.cluster.doctors import Doctors
from tests.cluster.faults import durable_parts, lost_groups, repeated_groups, unsound_manifests
from tests.filesystems import Mounts

SETTINGS = tuple(each for each in FAST if not each.startswith("cluster."))
"""Small iterations, with the beats and the limits that everybody gets."""


def carry(
    shared: Mounts, cache: Path, logs: Path, killed: Sequence[int | None], iterations: int, nodes: int = 3
) -> Cluster:
    """Train for `iterations` iterations, and return the cluster, of which no process is left.

    `killed[k]` is the rank that is killed in the rollout of iteration k + 2, or None; it is started again.
    `shared` has one client more than there are nodes, to look at the run. Raises AssertionError if a node
    ends with anything but 0, if a finished group was lost or generated again, or if a manifest does not name
    each group once.
    """
    cluster = Cluster(shared.seen(nodes) / "run", cache, logs, separate=True)
    cluster.environment |= {FORKS: str(logs / "forks")}
    imports = [sys.executable, "-m", "trainer.job.forks", str(logs / "forks"), *PROGRAMS[FORKS]]
    server = subprocess.Popen([*shared.inside, *imports], cwd=REPOSITORY, env=cluster.environment)
    weights = ",".join(["2", *["1"] * (nodes - 1)])
    master = [
        "--num-nodes",
        f"{nodes}",
        "--rank-weights",
        weights,
        "--iterations",
        f"{iterations}",
        *SETTINGS,
    ]

    def start(rank: int) -> None:
        given = () if rank else master
        cluster.start(rank, *given, prefix=shared.inside, root=shared.path(rank) / "run")

    kept: dict[Path, bytes] = {}
    try:
        for rank in range(nodes):
            start(rank)
        for iteration, rank in enumerate(killed, 2):
            if rank is None:
                continue
            parts = cluster.run_dir.trajectories("train", iteration)
            cluster.until(lambda: list(parts.glob("*.safetensors")), f"a part of iteration {iteration}", 400)  # noqa: B023
            cluster.kill(rank)
            cluster.nodes[rank].wait()
            kept |= durable_parts(cluster.run_dir)
            start(rank)
        codes = cluster.wait(600)
        said = cluster.everything_said()
        assert codes == [0] * nodes, said
        assert [line["iteration"] for line in cluster.metrics()] == list(range(1, iterations + 1)), said
        assert not killed or kept
        assert not (lost := lost_groups(cluster.run_dir, kept)), lost
        assert not (repeated := repeated_groups(cluster.run_dir)), repeated
        assert not (unsound := unsound_manifests(cluster.run_dir)), unsound
    finally:
        server.kill()
        server.wait()
        cluster.close()
    return cluster


def examine(shared: Mounts, nodes: int = 3) -> Mapping[str, Mapping[str, Any]]:
    """Return what `run doctor --peers` reports, by check."""
    doctors = Doctors(nodes, patience_s=900)  # it is slow where caches are
    try:
        for rank in range(nodes):
            doctors.start(rank, shared.path(rank) / "run", prefix=shared.inside)
        return doctors.report()
    finally:
        doctors.close()
