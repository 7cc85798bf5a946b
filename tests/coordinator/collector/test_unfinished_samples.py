"""What an iteration leaves unfinished goes on in the next one, and counts for nothing before it ends."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from coordinator.collector import unfinished_samples
from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory import manifests, published
from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter
from coordinator.keeping import resume
from coordinator.phases.tasks import draw_tasks
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from rollout.origin import origin_document
from rollout.settings import RolloutSettings
from rollout.tasks.task_set import load_tasks
from rollout.trajectory import UNFINISHED, Group, Span
from tests.coordinator.examples import ORIGIN, group, opened, origin, run_dir_at, write_json

MADE_WITH = origin_document(ORIGIN)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Iteration 1 has left two of its three groups unfinished, whose tasks are 10, 11 and 12."""
    made = run_dir_at(tmp_path)
    open_and_conclude(made, 1, unfinished(0, 1), group(1), unfinished(2, 1))
    return made


def unfinished(slot: int, iteration: int) -> Group:
    """One sample of the group has ended; the other one has three tokens, of which this iteration made one."""
    made = group(slot)
    for sample in made.samples:
        sample.reward = None
        sample.spans = [Span(2, 4, 0, 0), Span(4, 5, iteration, iteration - 1)]
    made.samples[1].finish_reason = UNFINISHED
    return made


def open_and_conclude(run_dir: RunDir, iteration: int, *groups: Group, **more: Any) -> dict[str, Any]:
    about = opened(iteration, ORIGIN, slots=len(groups), **more)
    about["groups"] -= len(more.get("begun", ()))
    about["tasks"] = [10 * iteration + slot for slot in range(len(groups))]
    write_json(run_dir.iteration_json(iteration), about)
    writer = PartWriter(run_dir, "train", iteration, 0, 2, ORIGIN)
    for each in groups:
        writer.add(each)
    writer.flush()
    directory = run_dir.trajectories("train", iteration)
    document, complete = manifests.manifest(directory, iteration, resume.quota(about), ORIGIN)
    manifests.publish_manifest(run_dir.manifest("train", iteration), document, complete)
    return document


def test_unfinished_groups_are_in_the_parts_and_count_for_nothing(run_dir: RunDir) -> None:
    manifest = published.read_manifest(run_dir, "train", 1) or {}
    assert manifest["unfinished"] == [0, 2] and manifest["parts"][0]["slots"] == [0, 1, 2]
    assert (manifest["groups"], manifest["samples"], manifest["reward"]) == (1, 2, 0.5)
    assert (manifest["tokens"], manifest["generated"]) == (6, 6 + 4)
    assert [group.slot for group in manifests.read_groups(run_dir.trajectories("train", 1), manifest)] == [1]
    lines = run_dir.groups("train", 1).read_text().splitlines()
    assert [json.loads(line)["slot"] for line in lines] == [1]


def test_next_iteration_goes_on_with_them_and_remembers_where_they_began(run_dir: RunDir) -> None:
    begun, tasks, again = unfinished_samples.left_by(run_dir, 1, MADE_WITH)
    assert [(one.iteration, one.slot, one.file_slot) for one in begun] == [(1, 0, 0), (1, 2, 2)]
    assert (tasks, again) == ([10, 12], [])
    found = unfinished_samples.read(run_dir, 2, begun, [1, 2])
    assert set(found) == {1} and found[1].slot == 2 and found[1].is_unfinished

    # Slot 1 of iteration 2 is the group 1 goes on with, slot 3 the second of its own.
    entries = [asdict(one) for one in begun]
    left = open_and_conclude(
        run_dir, 2, group(0), unfinished(1, 2), group(2), unfinished(3, 2), begun=entries
    )
    assert left["unfinished"] == [1, 3] and left["slots"] == 4
    begun, tasks, _ = unfinished_samples.left_by(run_dir, 2, MADE_WITH)
    assert [(one.iteration, one.slot, one.file_slot) for one in begun] == [(1, 2, 1), (2, 1, 3)]
    assert tasks == [21, 23]
    assert BegunGroup.all_of({"begun": [asdict(one) for one in begun]}) == begun


@pytest.mark.parametrize(
    "changed",
    [
        origin_document(origin(ORIGIN.policy, max_tokens=9)),
        origin_document(origin(ORIGIN.policy, temperature=0.5)),
        {**MADE_WITH, "environment": {"name": "calculator", "digest": ""}},
    ],
)
def test_samples_are_never_gone_on_with_by_another_sampling(
    run_dir: RunDir, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert unfinished_samples.left_by(run_dir, 1, changed) == ([], [], [10, 12])
    assert "iteration 1: 2 groups are begun again" in caplog.text
    tasks = load_tasks("builtin:arithmetic", seed=0, split="train")
    drawn = draw_tasks(run_dir, 2, RolloutSettings(), tasks, 4, [10, 12])
    assert drawn["tasks"][:2] == [10, 12], "and none of the tasks is lost"


def test_reward_may_change_before_a_group_has_ended(run_dir: RunDir) -> None:
    other = {**MADE_WITH, "reward": {"name": "length", "digest": "1" * 16}}
    assert len(unfinished_samples.left_by(run_dir, 1, other)[0]) == 2


@pytest.mark.parametrize("harm", ["cut", "altered", "gone"])
def test_group_whose_tokens_are_lost_is_begun_again(
    run_dir: RunDir, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, _, _ = unfinished_samples.left_by(run_dir, 1, MADE_WITH)
    part = run_dir.trajectories("train", 1) / begun[0].file
    data = part.read_bytes()
    part.write_bytes(data[:-1] if harm == "cut" else data[:-1] + b"!")
    if harm == "gone":
        part.unlink()
    assert unfinished_samples.read(run_dir, 2, begun, [0, 1, 5]) == {}
    assert part.name in caplog.text and "of those in it 2 groups are begun again" in caplog.text


def test_nothing_is_left_by_an_iteration_without_a_manifest(run_dir: RunDir) -> None:
    assert unfinished_samples.left_by(run_dir, 0, MADE_WITH) == ([], [], [])
    assert unfinished_samples.left_by(run_dir, 7, MADE_WITH) == ([], [], [])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rollout.environment": "calculator"}, "rollout.environment=calculator: only a single turn"),
        ({"trainer.algorithm": "sft"}, "rollout.environment=demonstration: only a single turn"),
        ({"rollout.stop": ["\n"]}, "rollout.stop: a stop string that is cut in two"),
        ({"rollout.over_sample": 1.5}, "rollout.over_sample=1.5: "),
        ({"rollout.dynamic_sampling": True}, "rollout.dynamic_sampling=true: "),
        (
            {"trainer.engine_correction": "off"},
            "rollout.segment_tokens=4 trains on samples of older policies",
        ),
        ({"rollout.segment_tokens": 0}, "rollout.segment_tokens"),
    ],
)
def test_what_cannot_go_on_in_segments_is_refused_in_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build({"model": "any/model", "rollout.segment_tokens": 4, **more})
    assert said in str(refused.value) and "\n" not in str(refused.value)
