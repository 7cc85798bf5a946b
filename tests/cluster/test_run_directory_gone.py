"""A run directory that somebody moves or removes under a run, and one whose mount is gone for a while."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from coordinator.machine.children import PROGRAMS
from coordinator.machine.gpus import count_gpus
from rollout.storage.retry import RETRY_S
from tests.cluster.cluster import FAST, Cluster

SLOW = ("cluster.node_timeout_s=4", "rollout.environment=tests.cluster.plugins:slow")


def remove(root: Path) -> None:
    """As `rm -rf` does, again and again, since the nodes write there meanwhile."""
    while root.exists():
        shutil.rmtree(root, ignore_errors=True)


def test_nodes_whose_run_directory_is_gone_name_it_and_end(cluster: Cluster) -> None:
    cluster.start(0, "--num-nodes", "2", "--iterations", "200", *FAST, *SLOW)
    cluster.start(1)
    cluster.until(lambda: cluster.metrics(), "the first iteration")
    remove(cluster.root)
    assert cluster.wait(120) == [1, 1], cluster.everything_said()
    for rank in (0, 1):
        last = cluster.output(rank).splitlines()[-1]
        assert f"{cluster.root} was moved or removed" in last, last


@pytest.mark.skipif(
    os.geteuid() != 0 or count_gpus() > 0 or not shutil.which("nsenter"), reason="needs a mount of its own"
)
def test_node_whose_mount_is_gone_for_a_while_comes_back(cluster: Cluster) -> None:
    share, mount = cluster.root.parent / "share", cluster.root.parent / "mount"
    share.mkdir()
    mount.mkdir()
    bind = f"mount --bind {share} {mount}"
    cluster.start(0, "--num-nodes", "2", "--iterations", "8", *FAST, *SLOW, root=share / "run")
    # What it would be forked from has mounts of its own.
    prefix = ("env", *(f"--unset={name}" for name in PROGRAMS))
    prefix += ("unshare", "-m", "bash", "-c", f'{bind} && exec "$@"', "bash")
    node = cluster.start(1, prefix=prefix, root=mount / "run")
    cluster.until(lambda: "iteration 1/" in cluster.output(0), "the first iteration")
    inside = ("nsenter", "-t", f"{node.pid}", "-m")
    subprocess.run([*inside, "umount", "-l", f"{mount}"], check=True)  # each call misses what it looks for
    cluster.until(lambda: "it comes back by itself" in cluster.output(1), "rank 1 misses its mount")
    time.sleep(RETRY_S + 3)  # longer than it takes to tell that a directory was moved
    assert node.poll() is None, cluster.everything_said()
    subprocess.run([*inside, *bind.split()], check=True)
    assert cluster.wait() == [0, 0], cluster.everything_said()
