"""Runs of two nodes on real shared filesystems, each node with a client of its own.

Only those that start within seconds; `scripts/bench/filesystems.py` has three nodes, and further filesystems.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.filesystems import REPOSITORY, Mounts, unavailable
from tests.filesystems.run import carry

QUICK = ("glusterfs", "moosefs")


@pytest.mark.timeout(600)  # five times torch is imported by an engine or a trainer
@pytest.mark.parametrize("kind", QUICK)
def test_killed_worker_comes_back_and_no_group_is_lost(kind: str, tmp_path: Path, cache: Path) -> None:
    if reason := unavailable(kind):
        pytest.skip(reason)
    with Mounts(kind, tmp_path / "fs", 3) as shared:
        carry(shared, cache, tmp_path, killed=[1], iterations=2, nodes=2)


@pytest.mark.timeout(400)
def test_no_iteration_on_sshfs_waits_for_its_default_caches(tmp_path: Path, cache: Path) -> None:
    """Each of its clients believes its own listing of a directory for 20 s."""
    if reason := unavailable("sshfs"):
        pytest.skip(reason)
    with Mounts("sshfs", tmp_path / "fs", 4) as shared:
        cluster = carry(shared, cache, tmp_path, killed=[], iterations=3)
        assert max(line["seconds"] for line in cluster.metrics()[1:]) < 20.0
        assert "hid the names of others" in cluster.everything_said()


def test_nothing_is_left_of_a_filesystem_whose_user_is_killed(tmp_path: Path) -> None:
    kind = "sshfs, caches off"
    if reason := unavailable(kind):
        pytest.skip(reason)
    script = """
import pathlib, subprocess, sys, time
from tests.filesystems import Mounts
with Mounts(sys.argv[1], pathlib.Path(sys.argv[2]), 2) as shared:
    node = [*shared.inside, sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(node, start_new_session=True, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        print(shared.seen(0), flush=True)
        time.sleep(600)
"""
    command = [sys.executable, "-c", script, kind, str(tmp_path / "fs")]
    user = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        seen = Path(user.stdout.readline().strip())
        assert os.path.ismount(seen)
        started = psutil.Process(user.pid).children(recursive=True)
        said = [" ".join(process.cmdline()) for process in started]
        assert any("sshfs" in words for words in said) and any("time.sleep" in words for words in said)
    finally:
        user.kill()
        user.communicate()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    assert not seen.exists()
