"""A run on real shared filesystems, each node with a client of its own: those that start within seconds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.filesystems import REPOSITORY, Mounts, unavailable
from tests.filesystems.run import carry

QUICK = ("sshfs, caches off", "glusterfs", "moosefs")


@pytest.mark.parametrize("kind", QUICK)
def test_killed_worker_comes_back_and_no_group_is_lost(kind: str, tmp_path: Path, cache: Path) -> None:
    if reason := unavailable(kind):
        pytest.skip(reason)
    with Mounts(kind, tmp_path / "fs", 4) as shared:
        carry(shared, cache, tmp_path, killed=[1], iterations=3)


def test_nothing_is_left_of_a_filesystem_whose_user_is_killed(tmp_path: Path) -> None:
    kind = "sshfs, caches off"
    if reason := unavailable(kind):
        pytest.skip(reason)
    script = (
        "import pathlib, sys, time; from tests.filesystems import Mounts\n"
        f"with Mounts({kind!r}, pathlib.Path(sys.argv[1]), 2) as shared:\n"
        "    print(shared.seen(0), flush=True); time.sleep(600)"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "fs")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    seen = Path(user.stdout.readline().strip())
    assert os.path.ismount(seen)
    started = psutil.Process(user.pid).children(recursive=True)
    assert any("sshfs" in process.name() for process in started)
    user.send_signal(signal.SIGKILL)
    user.communicate(timeout=10)
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
    assert not seen.exists()
