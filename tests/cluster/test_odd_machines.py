"""Machines that lack something, or have it by another name: a run on them is a run."""

import os
from pathlib import Path

import pytest

from tests.cluster.cluster import FAST, Cluster

LATIN = os.fsdecode(b"caf\xe9")
"""A name that somebody gave a directory under a Latin-1 locale: no UTF-8."""


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
