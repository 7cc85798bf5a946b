"""`run rescore`: real runs that train on the samples of another one with other rewards."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.console.commands.fork import fork
from coordinator.console.commands.rescore import Rescorer, rescore
from coordinator.console.commands.verify import verify
from coordinator.console.views.status import StatusReader
from coordinator.console.views.status_text import render
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings.tree import SettingsError
from rollout import stuck_user_code
from rollout.storage import files
from rollout.storage.files import SharedFsError
from rollout.trajectory import Group
from tests.cluster.cluster import FAST, Cluster, finish
from tests.cluster.plugins import letters
from tests.cluster.weights import farthest
from tests.coordinator.examples import tree
from tests.imports import shared_imports

DIGITS, LETTERS = "tests.cluster.plugins:digits", "tests.cluster.plugins:letters"


def weights_apart(one: Cluster, other: Cluster, iteration: int) -> float:
    return farthest(one.run_dir.checkpoint(iteration), other.run_dir.checkpoint(iteration))


def parts_of(run_dir: RunDir, iteration: int) -> list[str]:
    return sorted(path.name for path in run_dir.trajectories("train", iteration).glob("*.safetensors"))


def test_samples_with_other_rewards_are_trained_on_and_none_is_generated_again(
    cluster: Cluster,
    beside: Callable[[str], Cluster],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish(cluster, *FAST, "--iterations", "3", "--eval-interval", "1", "checkpoints.keep_last=4")
    before = {path: path.read_bytes() for path in cluster.root.rglob("*") if path.is_file()}
    same, other, generated = beside("same"), beside("other"), beside("generated")

    # ---- with the same reward: the bits of the parent, from samples that nobody has made again
    rescore(cluster.root, 2, None, DIGITS, same.root)
    assert "0 of 8 groups" in (printed := capsys.readouterr().out), printed
    assert "      0       0" in printed
    finish(same)
    for iteration in (2, 3):
        assert weights_apart(same, cluster, iteration) == 0.0
        assert parts_of(same.run_dir, iteration) == parts_of(cluster.run_dir, iteration)
    assert [line["reward"] for line in same.metrics()] == [line["reward"] for line in cluster.metrics()]

    # ---- with another one: as a run that had it from there on, as far as the samples are the same
    rescore(cluster.root, 2, 3, LETTERS, other.root)
    assert f"iterations 2 to 3 have the samples of {cluster.root}" in capsys.readouterr().out
    finish(other, "--iterations", "4")
    for iteration in (2, 3):
        ours, theirs = other.groups(iteration), cluster.groups(iteration)
        assert ours.keys() == theirs.keys() and parts_of(other.run_dir, iteration)
        for slot, group in ours.items():
            texts = [sample.text for sample in group.samples]
            assert texts == [sample.text for sample in theirs[slot].samples]
            assert [sample.reward for sample in group.samples] == [letters({}, text) for text in texts]
    fork(cluster.root, 2, generated.root)
    finish(generated, f"rollout.reward={LETTERS}", "--iterations", "2")
    assert weights_apart(other, generated, 2) == 0.0 < weights_apart(other, cluster, 2)
    for line in other.metrics()[1:3]:
        assert line["tokens_per_s"] is None and line["eval_reward"] is None, "the engine has generated"
    assert other.metrics()[3]["tokens_per_s"] > 0
    assert {path: path.read_bytes() for path in before} == before, "nothing of the parent changes"

    # ---- what is said of it
    text = render(StatusReader(other.root).read(), other.root)
    samples = "whose samples of iterations 2 to 3 have other rewards"
    assert f"forked from {cluster.root} at iteration 2, {samples}\n" in text
    assert [line["policy_iteration"] for line in other.metrics()] == [0, 1, 2, 3]
    ages = [line["age"] for line in other.metrics()]
    assert ages[1:3] == [0.0, 1.0], "the samples of iteration 3 are of a policy that only the parent has had"
    capsys.readouterr()
    shutil.rmtree(cluster.root)
    assert verify(other.root, None, files_only=True) == 0, capsys.readouterr().out
    for name, value in {**shared_imports(), "OMP_NUM_THREADS": "1"}.items():  # as the nodes above
        monkeypatch.setenv(name, value)
    assert verify(other.root, 3, files_only=False) == 0
    assert "iteration 3, trained again here on its samples: weights equal bit" in capsys.readouterr().out


def test_rescoring_that_cannot_be_is_one_line_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(cluster, *FAST, "--iterations", "2", "--eval-interval", "0")
    before = tree(tmp_path)
    new = tmp_path / "new"
    refusals = {
        (1, 3, DIGITS): r"--iteration 1: .* has no samples of iteration 3; there are those of .* 1 to 2$",
        (2, 1, DIGITS): "--last 1: is before --iteration 2; give it or a later one$",
        (1, None, "tests.cluster.plugins:nothing"): "--reward tests.cluster.plugins:nothing: .*nothing",
    }
    for (first, last, reward), text in refusals.items():
        with pytest.raises(SettingsError, match=text):
            rescore(cluster.root, first, last, reward, new)
    with pytest.raises(SettingsError, match=r"--to .*: is there already; give a new directory"):
        rescore(cluster.root, 1, None, DIGITS, cluster.root)
    rescore(cluster.root, 1, None, LETTERS, None)  # looks, and makes nothing
    assert "iteration  samples  changed  failed" in capsys.readouterr().out
    assert tree(tmp_path) == before

    def until_full(path: Path, data: bytes) -> None:
        if path.name == "iteration.json":
            raise SharedFsError("write", path, OSError(28, "No space left on device"), 0.0)
        path.write_bytes(data)

    with monkeypatch.context() as full:
        full.setattr(files, "publish", until_full)
        with pytest.raises(SettingsError, match=r"iteration.json: No space left .*; nothing was made$"):
            rescore(cluster.root, 1, None, LETTERS, new)
    assert tree(tmp_path) == before
    part = next(cluster.run_dir.trajectories("train", 2).glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SettingsError, match=r"safetensors differs from the manifest's checksum; nothing was"):
        rescore(cluster.root, 1, None, LETTERS, new)
    assert tree(tmp_path) == before


def test_sample_whose_reward_fails_is_left_out(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(cluster, *FAST, "--iterations", "1", "--eval-interval", "0")
    rescore(cluster.root, 1, None, "tests.cluster.plugins:picky", tmp_path / "new")
    manifest = published.read_manifest(RunDir(tmp_path / "new"), "train", 1) or {}
    assert 0 < manifest["failed_samples"] == 32 - manifest["samples"]
    with pytest.raises(
        SettingsError, match=r"^no sample of iteration 1 has got a reward: .*is broken; nothing"
    ):
        rescore(cluster.root, 1, None, "tests.cluster.plugins:broken", tmp_path / "broken")
    with pytest.raises(SettingsError, match=r"length=0.1 cannot score this task: .*`target_length`"):
        rescore(cluster.root, 1, None, f"{DIGITS} + length=0.1", tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    lost = Group(0, "t1", "p", [], given_up="it was too slow")
    scorer = Rescorer(cluster.root, 1, None, LETTERS)
    asyncio.run(scorer._score([lost], [{"id": "t1"}], (), None))
    asyncio.run(scorer._score([], [], (), None))
    assert lost.given_up == "it was too slow"
    monkeypatch.setattr(stuck_user_code, "AGAIN_S", 0.1)
    monkeypatch.setenv("BLOCKS", "1")
    failing = {
        "never": "took longer than",
        "leaving": "SystemExit: 3",
        "blocking": "took longer than .*an async reward that computes should be a plain function",
    }
    for reward, reason in failing.items():
        scorer = Rescorer(cluster.root, 1, None, f"tests.cluster.plugins:{reward}")
        scorer._settings = scorer._settings.model_copy(update={"group_timeout_s": 0.05})
        with pytest.raises(SettingsError, match=f"has got a reward: {reason}"):
            scorer.score_all()
