"""`run samples`: which samples are shown, and as which text."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from coordinator.console.views.samples import Order, choose_samples, show_samples
from coordinator.directory.layout import FORMAT, Kind, RunDir
from coordinator.directory.manifests import manifest, publish_manifest
from coordinator.directory.parts import PartWriter
from coordinator.protocol.records import GivenSettings, claim
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from rollout.origin import Code, Sampling, origin_document
from rollout.quota import Quota
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN, group, opened, record, run_dir_at, write_json


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


def collect(run_dir: RunDir, iteration: int, made: Group, kind: Kind = "train") -> None:
    writer = PartWriter(run_dir, kind, iteration, 1, 2, ORIGIN)
    directory = run_dir.trajectories(kind, iteration)
    directory.mkdir(parents=True)
    writer.add(made)
    writer.flush()
    document, groups = manifest(directory, iteration, Quota(1, 1), ORIGIN)
    publish_manifest(run_dir.manifest(kind, iteration), document, groups)


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


def test_evaluation_is_shown_where_nothing_else_is_with_the_answers_of_its_set(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `run eval -o` leaves it: all tasks are in named sets, and two sets may have the same ids."""
    sets: dict[str, str] = {}
    for name, answer in (("a", "one"), ("b", "two")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"id": "task-0", "prompt": "1+2=", "answer": answer}) + "\n")
        sets[f"eval.sets.{name}.tasks"] = str(path)
    settings = build({"model": "some/model", "tasks": "none", **sets})
    given = GivenSettings(host="node", settings={})
    claim(run_dir, record(settings=settings, members={0: 1}).model_copy(update={"given": given}))
    code = asdict(Code("exact", ""))
    of_set = {"tasks": "", "sampling": origin_document(Sampling()), "reward": code, "environment": code}
    document = opened(1, ORIGIN, 0, eval_sets=[
        {"name": "a", "begin": 1, "end": 2, "success": 1.0, **of_set},
        {"name": "b", "begin": 0, "end": 1, "success": 1.0, **of_set},
    ])  # fmt: skip
    write_json(run_dir.iteration_json(1), document)
    collect(run_dir, 1, group(0), "eval")
    show_samples(run_dir.root, None, 1, "spread", "train")
    assert "--- answer: two\n" in capsys.readouterr().out
