"""`run samples`: which samples are shown, and as which text."""

from pathlib import Path

import pytest

from coordinator.console.views.samples import Order, choose_samples, show_samples
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.manifests import manifest, publish_manifest
from coordinator.directory.parts import PartWriter
from coordinator.settings.tree import SettingsError
from rollout.quota import Quota
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN, group, run_dir_at, write_json


@pytest.mark.parametrize(
    ("order", "rewards"),
    [
        ("spread", [1.0, 0.5, 0.0, 0.5]),
        ("best", [1.0, 0.5, 0.5, 0.0]),
        ("worst", [0.0, 0.5, 0.5, 1.0]),
        ("flat", [0.5]),
    ],
)
def test_samples_are_chosen_by_reward(order: Order, rewards: list[float]) -> None:
    groups = [group(0, rewards=(1.0, 0.0)), group(1, rewards=(0.5, 0.5))]
    assert [chosen.sample.reward for chosen in choose_samples(groups, order)] == rewards


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path / "run")
    write_json(made.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    return made


def collect(run_dir: RunDir, iteration: int, made: Group) -> None:
    writer = PartWriter(run_dir, "train", iteration, 1, 2, ORIGIN)
    run_dir.trajectories("train", iteration).mkdir()
    writer.add(made)
    writer.flush()
    document, groups = manifest(run_dir.trajectories("train", iteration), iteration, Quota(1, 1), ORIGIN)
    publish_manifest(run_dir.manifest("train", iteration), document, groups)


def test_the_newest_iteration_that_has_samples_is_shown(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(run_dir, 1, group(0, rewards=(1.0, 0.0)))
    collect(run_dir, 2, group(0, rewards=(0.25, 0.75)))
    run_dir.trajectories("train", 3).mkdir()  # begun
    show_samples(run_dir.root, None, 1, "best", "train")
    shown = capsys.readouterr().out
    assert "=== iteration 2, task " in shown and "reward 0.75 (mean of 2: 0.5)" in shown
    show_samples(run_dir.root, 1, 5, "best", "train")
    assert capsys.readouterr().out.count("=== iteration 1") == 2


def test_a_model_that_is_gone_leaves_the_words(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    made = group(0, rewards=(1.0, 0.0))
    collect(run_dir, 1, made)
    show_samples(run_dir.root, 1, 1, "best", "train")
    shown = capsys.readouterr().out
    assert made.prompt in shown and made.samples[0].text in shown


def test_what_is_not_there_is_one_line(run_dir: RunDir) -> None:
    with pytest.raises(SettingsError, match="no train trajectories of iteration 1; there are none yet"):
        show_samples(run_dir.root, None, 1, "best", "train")
    collect(run_dir, 1, group(0, rewards=(1.0, 0.0)))
    with pytest.raises(SettingsError, match="no train sample whose group has the same reward"):
        show_samples(run_dir.root, None, 1, "flat", "train")
