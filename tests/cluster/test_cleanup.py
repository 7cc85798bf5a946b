"""`run cleanup` after real nodes were killed: what goes, what stays, and how a start goes on from there."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.directory.layout import RunDir
from rollout.part_file import decode_part
from tests.cluster.cluster import FAST, REPOSITORY, Cluster, token_ids
from tests.commands import run_forked

SLOW = (
    *FAST,
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.concurrency=4",
    "rollout.tasks_per_iteration=24",
    "cluster.node_timeout_s=4",
    "--iterations",
    "1",
)
"""One iteration."""
LONG_S = 2.0
"""What a group takes in a rollout that is to be hit: half a minute in all."""


@pytest.fixture
def calm(tmp_path: Path, cache: Path) -> Iterator[Cluster]:
    """Another run directory, for the run that nothing disturbs."""
    (tmp_path / "calm").mkdir()
    nodes = Cluster(tmp_path / "calm" / "run", cache, tmp_path / "calm")
    nodes.environment["SLOW_S"] = "0"
    yield nodes
    nodes.close()


def clean(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    """`run cleanup` of iteration 1, to its end."""
    words = ["cleanup", "--iteration", "1", "--log-path", str(cluster.root), *options]
    return run_forked(words, REPOSITORY, os.environ)


def start(cluster: Cluster, arguments: tuple[str, ...], slow_s: float = 0.0) -> None:
    """A master and one worker; `slow_s`: of each group."""
    slow = {"SLOW_S": str(slow_s)}
    # A node that is slow to start would claim nothing.
    cluster.start(0, "--num-nodes", "2", "--rank-weights", "1,1", *arguments, variables=slow)
    cluster.start(1, variables=slow)


def parts(run_dir: RunDir) -> list[Path]:
    """The parts of the training rollout, of all ranks."""
    return sorted(run_dir.trajectories("train", 1).glob("*.safetensors"))


def reach_rollout(cluster: Cluster) -> None:
    """Wait until both ranks have finished groups, and some are still to come."""
    ranks = {"r0000", "r0001"}
    cluster.until(lambda: {path.name[:5] for path in parts(cluster.run_dir)} == ranks, "the first parts", 120)


def kill_all(cluster: Cluster) -> None:
    for rank in cluster.nodes:
        cluster.kill(rank)
    assert cluster.wait(120) == [-signal.SIGKILL] * len(cluster.nodes), "killed in mid-rollout"
    cluster.until(lambda: not cluster.left_behind(), "the end of the nodes' children")


def content(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_killed_iteration_is_cleaned_and_a_start_makes_the_same_trajectories_anew(
    cluster: Cluster, calm: Cluster, engine_url: str
) -> None:
    arguments = (*SLOW, "--rl-phase", "rollout", "--engine-url", engine_url)
    start(cluster, arguments, slow_s=LONG_S)
    reach_rollout(cluster)
    before = content(cluster.run_dir.trajectories("train", 1))
    refusal = clean(cluster)
    assert refusal.returncode == 1
    assert "looking for 4 s whether a node still beats" in refusal.stdout
    master = cluster.nodes[0].pid
    assert len(refusal.stderr.splitlines()) == 1 and "rank 0 (" in refusal.stderr
    assert f"kill -INT {master} on " in refusal.stderr
    after = content(cluster.run_dir.trajectories("train", 1))
    assert before.items() <= after.items()

    kill_all(cluster)
    killed = content(cluster.root)
    announced = clean(cluster, "--dry-run")
    assert announced.returncode == 0 and content(cluster.root) == killed
    done = clean(cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout == announced.stdout.replace("would remove", "removed")
    assert not content(cluster.run_dir.trajectories("train", 1))
    assert json.loads(cluster.command("status", "--json"))["state"] == "stopped"

    start(cluster, arguments)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert calm.run(1, *arguments) == [0]
    assert token_ids(cluster.groups(1)) == token_ids(calm.groups(1))
    finished = clean(cluster)
    assert (finished.returncode, finished.stderr) == (2, "run: iteration 1 is finished, nothing is removed\n")


def test_node_that_slept_through_a_cleanup_ends_and_the_run_goes_on_without_it(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*SLOW, "--rl-phase", "rollout", "--engine-url", engine_url)
    start(cluster, arguments, slow_s=LONG_S)
    reach_rollout(cluster)
    for rank in (1, 0):
        cluster.kill(rank, signal.SIGSTOP)
    done = clean(cluster)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        cluster.kill(rank, signal.SIGCONT)
    assert cluster.wait(120) == [4, 130], cluster.everything_said()
    assert "run cleanup --iteration 1 has stopped the run" in cluster.output(1)
    assert not cluster.run_dir.manifest("train", 1).exists()
    start(cluster, arguments)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert sorted(cluster.groups(1)) == list(range(24))


def test_training_goes_on_with_the_groups_that_keep_partial_has_kept(cluster: Cluster) -> None:
    start(cluster, (*SLOW, "--eval-interval", "0"), slow_s=LONG_S)
    reach_rollout(cluster)
    kill_all(cluster)
    written = [group for path in parts(cluster.run_dir) for group in decode_part(path.read_bytes())[1]]
    finished = {group.slot for group in written}
    assert 0 < len(finished) < 24
    kept = content(cluster.run_dir.trajectories("train", 1))
    done = clean(cluster, "--keep-partial")
    assert done.returncode == 0, done.stderr
    assert f"keeps {len(finished)} of 24 groups" in done.stdout
    manifest = cluster.run_dir.manifest("train", 1).read_bytes()

    start(cluster, (*SLOW, "--eval-interval", "0"))
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert cluster.run_dir.manifest("train", 1).read_bytes() == manifest
    assert kept.items() <= content(cluster.run_dir.trajectories("train", 1)).items()
    assert cluster.groups(1).keys() == finished
    line = cluster.metrics()[0]
    assert (line["iteration"], line["samples"]) == (1, 4 * len(finished)) and line["loss"] is not None
    assert cluster.run_dir.checkpoint(1).is_dir()
