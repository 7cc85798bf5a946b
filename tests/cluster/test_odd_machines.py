"""Machines that lack something, or have it by another name: a run on them is a run."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from coordinator.machine.gpus import count_gpus
from tests.cluster.cluster import FAST, Cluster

LATIN = os.fsdecode(b"caf\xe9")
"""A name that somebody gave a directory under a Latin-1 locale: no UTF-8."""

READ_ONLY = (
    "mount --bind $share $share; mount -o remount,ro,bind /; "
    "for d in /tmp /var/tmp /dev/shm /root; do mount --bind $d $d; mount -o remount,ro,bind $d; done"
)
"""Mounts of a container with readOnlyRootFilesystem: only the shared directory can be written. No semaphore
can be made."""


def test_a_run_lives_in_directories_whose_names_are_no_utf8(tmp_path: Path) -> None:
    for name in ("home", "tmp"):
        (tmp_path / LATIN / name).mkdir(parents=True)
    cluster = Cluster(tmp_path / LATIN / "run", tmp_path / LATIN / "home", tmp_path)
    cluster.environment["TMPDIR"] = str(tmp_path / LATIN / "tmp")
    try:
        cluster.start(0, *FAST, "--num-nodes", "1", "--iterations", "1", role=("local",))
        assert cluster.wait() == [0], cluster.everything_said()
        assert cluster.run_dir.checkpoint(1).is_dir() and cluster.run_dir.metrics.exists()
        assert "iteration 1" in cluster.command("status")
    finally:
        cluster.close()


@pytest.mark.parametrize("option", ["--model", "--data-path"])
def test_a_path_for_every_node_that_is_no_utf8_is_refused(cluster: Cluster, option: str) -> None:
    there = cluster.root.parent / LATIN
    there.mkdir()
    assert cluster.run(1, *FAST, option, str(there)) == [2]
    (line,) = cluster.output(0).splitlines()
    assert "is not written in UTF-8: give a link" in line
    assert not cluster.root.exists()


def _unshares(*options: str) -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", *options, "true"]).returncode


@pytest.mark.skipif(os.geteuid() != 0 or not _unshares("-m", "-n"), reason="needs namespaces of its own")
@pytest.mark.skipif(count_gpus() > 0, reason="with GPUs nothing is forked")
def test_a_container_that_lacks_nearly_everything_carries_a_run_and_says_so(cache: Path) -> None:
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/opt") as made:
        share = Path(made) / "share"
        share.mkdir()
        cluster = Cluster(share / "x", cache, Path(made), separate=True)
        script = f'share={share}; {READ_ONLY} || exit 99; exec "$@"'
        prefix = ("unshare", "-mn", "bash", "-c", script, "bash")
        words = ["the loopback interface was down", "no semaphores", "no directory for temporary files"]
        try:
            ranks = ("--num-nodes", "1", "trainer.processes_per_node=2")
            cluster.start(0, *FAST, *ranks, "--iterations", "1", role=("local",), prefix=prefix)
            assert cluster.wait() == [0], cluster.everything_said()
            assert [text for text in words if text not in cluster.output(0)] == []
        finally:
            cluster.close()
