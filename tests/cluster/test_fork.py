"""`run fork` and `run diff`: real runs that go on from an iteration of another one, and where they part."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.console.commands.fork import fork
from coordinator.console.report import write_comparison
from coordinator.console.views.difference import ComparedIterations, compare, describe_difference
from coordinator.console.views.run import Run
from coordinator.console.views.status import StatusReader
from coordinator.console.views.status_text import render
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings.tree import SettingsError
from tests.cluster.cluster import FAST, Cluster, finish
from tests.cluster.weights import farthest
from tests.coordinator.examples import tree

GIVEN = (*FAST, "--iterations", "4", "--eval-interval", "2", "rollout.segment_tokens=4")
"""With groups that one iteration begins and the next one takes up. The optimizer's state is saved rarely: a
job gets to the others by training again."""


def test_fork_that_changes_nothing_ends_with_the_bits_of_its_parent_and_one_with_another_reward_does_not(
    cluster: Cluster, beside: Callable[[str], Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    finish(cluster, *GIVEN, "trainer.save_interval=3", "checkpoints.keep_last=4")
    before = {path: path.read_bytes() for path in cluster.root.rglob("*") if path.is_file()}
    same, other = beside("same"), beside("other")

    forked = fork(cluster.root, 3, same.root)
    assert forked.files > 10 and forked.copied_bytes == 0
    finish(same)
    for iteration in (3, 4):
        ours, theirs = same.run_dir.checkpoint(iteration), cluster.run_dir.checkpoint(iteration)
        assert farthest(ours, theirs) == 0.0
    assert [line["reward"] for line in same.metrics()] == [line["reward"] for line in cluster.metrics()]
    assert {path: path.read_bytes() for path in before} == before, "nothing of the parent changes"
    all_four = [1, 2, 3, 4]
    assert compare(Run(cluster.root), Run(same.root)) == ComparedIterations(
        all_four, all_four, all_four, None
    )

    fork(same.root, 4, other.root)
    shutil.rmtree(cluster.root)
    parent = same.root.rename(same.root.with_name("renamed"))
    finish(other, "rollout.reward=tests.cluster.plugins:constant")
    lines, are_equal = describe_difference(parent, other.root)
    assert not are_equal
    printed = "\n".join([*lines, ""])
    page = write_comparison(parent, other.root, lines, other.root.with_name("page.html")).read_text()
    assert f"<li>A: {parent}</li>" in page and 'aria-label="Reward: A: renamed training' in page
    assert "A and B differ from iteration 4 on, first in train_rollout: task " in printed
    assert " against 0.5, for the same text " in printed
    assert (
        "setting --reward: tests.cluster.plugins:digits against tests.cluster.plugins:constant\n" in printed
    )
    assert [line["reward"] for line in other.metrics()[:3]] != [0.5] * 3
    assert other.metrics()[3]["reward"] == 0.5
    text = render(StatusReader(other.root).read(), other.root)
    assert f"forked from {same.root} at iteration 4\nforked from {cluster.root} at iteration 3" in text


def test_fork_at_the_first_iteration_of_a_run_whose_model_is_elsewhere_has_nothing_to_link(
    cluster: Cluster, beside: Callable[[str], Cluster]
) -> None:
    finish(cluster, *FAST, "--iterations", "1", "--eval-interval", "0")
    cluster.run_dir.base_model.rename(cluster.root.with_name("model"))
    forked = fork(cluster.root, 1, beside("new").root)
    assert forked.files == 0


def test_fork_is_refused_where_the_parent_has_no_policy_any_more(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(cluster, *FAST, "--iterations", "3", "--eval-interval", "0", "checkpoints.keep_last=2")
    before = tree(tmp_path)
    refusals = {
        2: "iteration 1 of .* has no checkpoint any more; the run can be forked at 1, .*4$",
        6: "iteration 5 of .* is not finished; the run can be forked at 1, .*4$",
    }
    for iteration, text in refusals.items():
        with pytest.raises(SettingsError, match=text):
            fork(cluster.root, iteration, tmp_path / "new")
    with pytest.raises(SettingsError, match=r"--to .*: is there already; give a new directory"):
        fork(cluster.root, 4, cluster.root)
    with pytest.raises(SettingsError, match=r"--to .*: is in the run at"):
        fork(cluster.root, 4, cluster.root / "fork")
    with pytest.raises(SettingsError, match=r"no run there \(no such directory; beside it is the run run\)"):
        fork(tmp_path / "nothing", 4, tmp_path / "new")

    def removed_meanwhile(run_dir: RunDir) -> list[int]:
        there = checkpoints(run_dir)
        (run_dir.checkpoint(3) / "model.safetensors").unlink(missing_ok=True)
        return there

    checkpoints = published.checkpoints
    monkeypatch.setattr(published, "checkpoints", removed_meanwhile)
    with pytest.raises(SettingsError, match=r"model.safetensors is missing or differs .*; nothing was made"):
        fork(cluster.root, 4, tmp_path / "new")
    assert tree(tmp_path) == before - {
        str((cluster.run_dir.checkpoint(3) / "model.safetensors").relative_to(tmp_path))
    }


def test_fork_on_another_filesystem_is_a_copy(
    cluster: Cluster, beside: Callable[[str], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(cluster, *FAST, "--iterations", "1", "--eval-interval", "0")

    def link(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    def copy_until_full(source: Path, target: Path) -> None:
        if source.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        shutil.copy(source, target)

    monkeypatch.setattr("os.link", link)
    copy = beside("copy")
    there = tree(copy.root.parent)
    with monkeypatch.context() as full:
        full.setattr("shutil.copy2", copy_until_full)
        with pytest.raises(SettingsError, match=r"No space left on device; nothing was made"):
            fork(cluster.root, 2, copy.root)
    assert tree(copy.root.parent) == there
    forked = fork(cluster.root, 2, copy.root)
    monkeypatch.undo()
    assert forked.copied_bytes == forked.bytes > 0
    finish(copy, "--iterations", "2")
    assert [line["iteration"] for line in copy.metrics()] == [1, 2]
