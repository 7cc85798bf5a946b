"""`run local`: all nodes with one command. What they start are forks of two processes."""

import sys
from pathlib import Path

import psutil
import pytest

from coordinator.machine.gpus import count_gpus
from rollout.storage.hashing import checksums
from tests.cluster.cluster import FAST, Cluster, token_ids
from tests.cluster.conftest import SEPARATE

LOCAL = ("local",)
FORKS = "trainer.job.forks"
needs_forks = pytest.mark.skipif(
    sys.platform != "linux" or count_gpus() > 0, reason="nothing is forked where there are GPUs"
)


def forks_of(parent: int) -> list[psutil.Process]:
    """The shared processes below `run local`, their forks, and theirs."""
    found = psutil.Process(parent).children(recursive=True)
    return [process for process in found if FORKS in " ".join(process.cmdline())]


def test_run_local_trains_what_separate_nodes_train(tmp_path: Path, cache: Path) -> None:
    arguments = (*FAST, "--num-nodes", "2", "--iterations", "1")
    found = []
    for name in ("local", "separate"):
        (tmp_path / name).mkdir()
        cluster = Cluster(tmp_path / name / "run", cache, tmp_path / name, separate=name == "local")
        try:
            if name == "local":
                cluster.start(0, *arguments, role=LOCAL)
                assert cluster.wait() == [0], cluster.everything_said()
            else:
                assert cluster.run(2, *arguments) == [0, 0], cluster.everything_said()
            weights = checksums(cluster.run_dir.checkpoint(1))["model.safetensors"]
            found.append((weights, token_ids(cluster.groups(1))))
        finally:
            cluster.close()
    assert found[0] == found[1]


@needs_forks
@SEPARATE
def test_engines_trainers_and_collectors_are_forks(cluster: Cluster) -> None:
    """The run goes on without the processes that they are forks of, and nothing outlives its parent."""
    parent = cluster.start(
        0, *FAST, "--num-nodes", "1", "--iterations", "1000", "trainer.processes_per_node=2", role=LOCAL
    )
    cluster.until(lambda: cluster.run_dir.checkpoint(1).is_dir(), "the first checkpoint", 120)
    # The servers; an engine, an agent, two ranks and a collector. What follows imports for itself: one node.
    assert len(forks_of(parent.pid)) == 2 + 5
    servers = [p for p in psutil.Process(parent.pid).children() if FORKS in " ".join(p.cmdline())]
    assert len(servers) == 2
    for server in servers:
        server.kill()
    done = len(cluster.metrics())
    cluster.until(lambda: len(cluster.metrics()) >= done + 2, "further iterations")
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, len(cluster.metrics()) + 1))
    parent.kill()
    parent.wait()
    cluster.until(lambda: not cluster.left_behind(), "the end of all processes", 60)
