"""A node that stands still, is replaced, and wakes: the newer process goes on, the older one touches nothing.

The places are those at which the older one goes on with what it would do next: raise a flag of its epoch, or
publish what the replacement has published meanwhile.
"""

import hashlib
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.directory.file_names import Record
from coordinator.directory.layout import RunDir
from coordinator.protocol.phase import Phase
from tests.cluster.cluster import Cluster
from tests.cluster.faults import durable_parts, lost_groups, repeated_groups, unsound_manifests
from tests.cluster.small_run import ITERATIONS, arguments, results

PLACES = [
    (1, Phase.TRAINING, "before"),
    (0, Phase.TRAIN_FILES_READY, "after"),
    (0, Phase.ITERATION_END, "before"),
]


def published(run_dir: RunDir) -> dict[Path, str]:
    """What the run has published for good, with a digest of each file."""
    directories = ("train_trajectories", "eval_trajectories", "batches", "checkpoints")
    files = [path for name in directories for path in (run_dir.root / name).rglob("*") if path.is_file()]
    lasting = [path for path in files if "/." not in str(path) and path != run_dir.latest]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in lasting}


def start_stopping(
    cluster: Cluster, engine_urls: list[str], victim: int, phase: Phase, when: str
) -> psutil.Process:
    """Start both nodes and wait until the victim stands still; its process."""
    for rank in (0, 1):
        stopping = ["tests.cluster.dying_node", phase.label, when, "STOP"]
        program = stopping if rank == victim else ["coordinator.cli"]
        cluster.start(rank, *arguments(rank, engine_urls), program=program)
    stopped = psutil.Process(cluster.nodes[victim].pid)
    cluster.until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the node stands still", 120)
    return stopped


@pytest.mark.parametrize(("victim", "phase", "when"), PLACES)
def test_replaced_node_that_wakes_exits_4_and_changes_nothing(
    cluster: Cluster,
    engine_urls: list[str],
    undisturbed: list[dict[str, Any]],
    tmp_path: Path,
    victim: int,
    phase: Phase,
    when: str,
) -> None:
    start_stopping(cluster, engine_urls, victim, phase, when)
    old = cluster.nodes[victim]
    kept = durable_parts(cluster.run_dir)
    # Another machine, as far as the lock goes that keeps one process of a rank on each.
    elsewhere = ["env", f"TMPDIR={tmp_path}"]
    cluster.start(victim, *arguments(victim, engine_urls), prefix=elsewhere)
    taken_over = cluster.run_dir.entry(Record(3))
    cluster.until(taken_over.exists, "another epoch", 120)  # the line of the iteration may be the old one's
    cluster.until(lambda: len(cluster.metrics()) >= 1, "the first iteration without it", 120)
    assert old.poll() is None
    before, lines = published(cluster.run_dir), cluster.metrics()

    old.send_signal(signal.SIGCONT)
    assert old.wait(120) == 4, cluster.everything_said()
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert f"rank {victim} was taken over by incarnation 2" in cluster.output(victim)
    after = published(cluster.run_dir)
    assert {path: after.get(path) for path in before} == before
    assert cluster.metrics()[: len(lines)] == lines
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert cluster.run_dir.latest.read_text() == f"iteration_{ITERATIONS:06d}\n"
    assert lost_groups(cluster.run_dir, kept) == repeated_groups(cluster.run_dir) == []
    assert unsound_manifests(cluster.run_dir) == []
    assert results(cluster) == undisturbed


def test_replacement_on_the_same_host_ends_a_process_that_stands_still(
    cluster: Cluster, engine_urls: list[str], undisturbed: list[dict[str, Any]]
) -> None:
    start_stopping(cluster, engine_urls, 0, Phase.TRAIN_ROLLOUT, "before")
    old = cluster.nodes[0]
    cluster.start(0, *arguments(0, engine_urls))
    assert old.wait(120) == -signal.SIGKILL
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert "killing the older process of this rank on this host" in cluster.output(0)
    assert repeated_groups(cluster.run_dir) == []
    assert results(cluster) == undisturbed
