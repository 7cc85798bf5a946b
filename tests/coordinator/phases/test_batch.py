"""Phase 8: the batch on disk, and the replay window it is drawn from."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.directory import manifests, parts, published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.phases.batch import ensure_batch
from coordinator.protocol.exits import NodeEnded
from coordinator.settings.loading import build
from rollout.quota import Quota
from rollout.storage import files
from rollout.tasks.task_set import TaskSet
from rollout.trajectory import Group
from tests.coordinator.examples import POLICY, group, origin, run_dir_at
from trainer.batch.batch import Batch

SLOTS = 6


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Three iterations with their manifests; the first trained token of a sample is 10 x the iteration's."""
    run_dir = run_dir_at(tmp_path)
    for iteration in (1, 2, 3):
        publish(run_dir, iteration)
    return run_dir


def publish(
    run_dir: RunDir,
    iteration: int,
    groups: Sequence[Group] = (),
    policy_iteration: int | None = None,
    reward: str = "exact",
    **sampling: Any,
) -> None:
    directory = run_dir.trajectories("train", iteration)
    directory.mkdir()
    run_dir.batch(iteration).mkdir()
    made_with = origin(
        f"{POLICY}{iteration}", iteration - 1 if policy_iteration is None else policy_iteration, **sampling
    )
    made_with = replace(made_with, reward=replace(made_with.reward, name=reward))
    writer = parts.PartWriter(run_dir, "train", iteration, 0, 1, made_with)
    groups = groups or [group(slot, mark=10 * iteration) for slot in range(SLOTS)]
    for each in groups:
        writer.add(each)
    writer.flush()
    quota = Quota(len(groups), len(groups))
    manifest = manifests.manifest(directory, iteration, quota, made_with)
    manifests.publish_manifest(run_dir.manifest("train", iteration), *manifest)


def make(run_dir: RunDir, iteration: int, **settings: Any) -> tuple[Batch, dict[str, Any]]:
    """The batch of an iteration, and its batch.json."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    ensure_batch(run_dir, iteration, build(given))
    directory = run_dir.batch(iteration)
    about = json.loads((directory / "batch.json").read_text())
    return Batch.decode((directory / "batch.safetensors").read_bytes()), about


def iterations_in(batch: Batch) -> set[int]:
    return {int(token) // 10 for token in batch.token_ids[batch.offsets[:-1] + 2]}


def test_batch_is_of_its_own_iteration_by_default(run_dir: RunDir) -> None:
    batch, about = make(run_dir, 3)
    assert iterations_in(batch) == {3} and len(batch) == 2 * SLOTS
    assert batch.policy == f"{POLICY}3" and about["window"] == [3]
    assert batch.manifest_sha256 == about["manifest_sha256"] == published.manifest_digest(run_dir, 3)


def test_window_reaches_back_as_far_as_it_is_long(run_dir: RunDir) -> None:
    seen: dict[int, set[int]] = {}
    for window in (2, 3, 10):
        found = [make(run_dir, 3, trainer__replay_window=window, rollout__seed=k) for k in range(4)]
        assert {about["window"][0] for _, about in found} == {max(1, 4 - window)}
        seen[window] = set().union(*(iterations_in(batch) for batch, _ in found))
    assert seen == {2: {2, 3}, 3: {1, 2, 3}, 10: {1, 2, 3}}


def test_replayed_batch_says_what_is_of_this_iteration(run_dir: RunDir) -> None:
    batch, about = make(run_dir, 3, trainer__replay_window=3)
    assert len(batch) == 2 * SLOTS and batch.policy == f"{POLICY}3"
    assert batch.counts.groups == SLOTS and batch.counts.reward == about["reward"] == 0.5
    of_others = int((batch.token_ids[batch.offsets[:-1] + 2] != 30).sum())
    assert about["samples_replayed"] == of_others > 0


def test_damaged_or_missing_iteration_shrinks_the_window_with_a_warning(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.manifest("train", 1).unlink()
    (part,) = run_dir.trajectories("train", 2).glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        batch, about = make(run_dir, 3, trainer__replay_window=3)
    assert about["window"] == [3] and iterations_in(batch) == {3}
    assert [record.getMessage()[:41] for record in caplog.records] == [
        "iteration 1 is not replayed in iteration ",
        "iteration 2 is not replayed in iteration ",
    ]
    assert run_dir.manifest("train", 2).exists()


def test_damaged_part_of_the_iteration_itself_sends_it_back_to_its_rollout(run_dir: RunDir) -> None:
    (part,) = run_dir.trajectories("train", 3).glob("*.safetensors")
    part.write_bytes(b"")
    with pytest.raises(Incomplete, match=part.name):
        make(run_dir, 3)
    assert not run_dir.manifest("train", 3).exists()


def stamp(run_dir: RunDir) -> int:
    return (run_dir.batch(3) / "batch.safetensors").stat().st_ino


def test_batch_that_is_there_is_adopted(run_dir: RunDir) -> None:
    make(run_dir, 3, trainer__replay_window=2)
    before = stamp(run_dir)
    run_dir.manifest("train", 2).unlink()  # gone since
    make(run_dir, 3, trainer__replay_window=2, trainer__learning_rate=0.5)
    assert stamp(run_dir) == before


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer__advantage": "standardised"},
        {"trainer__algorithm": "dapo"},
        {"trainer__replay_window": 3},
        {"trainer__reward_threshold": 1.0},
        {"rollout__seed": 1},
    ],
)
def test_batch_is_made_anew_when_a_setting_that_shapes_it_has_changed(
    run_dir: RunDir, changed: dict[str, Any]
) -> None:
    make(run_dir, 3)
    batch, _ = make(run_dir, 3, **changed)
    (run_dir.batch(3) / "batch.json").unlink()
    again, _ = make(run_dir, 3, **changed)
    assert batch.encode() == again.encode()


def test_damaged_batch_is_made_anew(run_dir: RunDir) -> None:
    batch, _ = make(run_dir, 3)
    path = run_dir.batch(3) / "batch.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert make(run_dir, 3)[0].encode() == batch.encode()


def test_policy_older_than_the_run_asks_for_is_warned_of(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    publish(run_dir, 7, policy_iteration=4)
    with caplog.at_level(logging.WARNING):
        make(run_dir, 3)
        make(run_dir, 7, cluster__max_async_level=2)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        make(run_dir, 7, cluster__max_async_level=1, trainer__reward_threshold=-1)
    assert (
        "off-policy: iteration 7 was generated by the policy of iteration 4, 2 trainings ago" in caplog.text
    )


def test_samples_of_policies_that_are_too_old_are_not_trained_on(run_dir: RunDir) -> None:
    publish(run_dir, 7, policy_iteration=4)
    assert len(make(run_dir, 7, trainer__max_off_policy_steps=2)[0])
    assert not len(make(run_dir, 7, trainer__max_off_policy_steps=1)[0])


def test_samples_that_the_loss_cannot_train_end_the_run_in_one_line(run_dir: RunDir) -> None:
    demonstrated = group(0)
    for sample in demonstrated.samples:
        sample.logprobs[sample.loss_mask == 1] = float("nan")
    publish(run_dir, 4, [demonstrated])
    with pytest.raises(NodeEnded, match=r"iteration 4: 2 of 2 sequences are demonstrations"):
        make(run_dir, 4)


# ---- the sampling is the iteration's own


@pytest.mark.parametrize("phase", ["both", "update"])
def test_batch_has_the_temperature_that_its_iteration_was_sampled_at(run_dir: RunDir, phase: str) -> None:
    publish(run_dir, 4, temperature=0.5)
    batch, _ = make(run_dir, 4, rl_phase=phase, rollout__temperature=1.7)
    assert set(batch.temperatures.tolist()) == {0.5} and set(batch.ages.tolist()) == {0}


def test_replayed_sequences_keep_their_temperature_and_have_their_age(run_dir: RunDir) -> None:
    publish(run_dir, 4, temperature=0.5)
    publish(run_dir, 5, temperature=0.25)
    seen: set[tuple[int, float, int]] = set()
    for seed in range(4):
        batch, _ = make(run_dir, 5, trainer__replay_window=3, rollout__seed=seed)
        marks = (batch.token_ids[batch.offsets[:-1] + 2] // 10).tolist()
        ages = batch.ages[batch.offsets[1:] - 1].tolist()  # of the last tokens, which are trained
        seen |= set(zip(marks, batch.temperatures.tolist(), ages, strict=True))
    assert seen == {(5, 0.25, 0), (4, 0.5, 1), (3, 1.0, 2)}


def test_penalty_for_length_is_by_the_longest_completion_of_the_iteration(run_dir: RunDir) -> None:
    """Two good answers, of three tokens and of two: they differ by the penalty alone."""
    one = group(0, rewards=(1.0, 1.0))
    one.samples[0].loss_mask[2] = 0
    publish(run_dir, 4, [one], max_tokens=3)
    penalise = {"trainer__overlong": "penalise", "trainer__overlong_buffer": 0.5}
    batch, _ = make(run_dir, 4, **penalise, rollout__max_tokens=4096)
    assert sorted(batch.advantages.tolist()) == pytest.approx([-1 / 3, 1 / 3])


def test_batch_that_is_there_does_not_depend_on_the_sampling_of_today(run_dir: RunDir) -> None:
    make(run_dir, 3)
    before = stamp(run_dir)
    make(run_dir, 3, rollout__temperature=0.7, rollout__max_tokens=9)
    assert stamp(run_dir) == before


def test_rewards_count_by_the_weights_that_the_samples_were_made_with(run_dir: RunDir) -> None:
    """Those of the manifest of each iteration, whatever the settings are now."""
    publish(run_dir, 4, groups=[rewarded(0, 20)], reward="exact=1 + length=-0.5")
    publish(run_dir, 5, groups=[rewarded(0, 50)], reward="exact=1 + length=2")
    now = {"trainer__algorithm": "gdpo", "rollout__reward": "exact=1 + length=7"}
    batches = [make(run_dir, iteration, **now)[0] for iteration in (4, 5)]
    signs = [
        dict(zip(batch.rewards.tolist(), np.sign(batch.advantages).tolist(), strict=True))
        for batch in batches
    ]
    assert signs == [{1.0: 1.0, 0.0: -1.0}, {1.0: -1.0, 0.0: 1.0}]


def rewarded(slot: int, mark: int) -> Group:
    """The better answer by the one reward is the worse one by the other."""
    made = group(slot, mark=mark)
    for sample, (exact, length) in zip(made.samples, [(1.0, 0.0), (0.0, 1.0)], strict=True):
        sample.metrics = {"exact": exact, "length": length}
    return made


def test_batch_of_sources_depends_on_them_and_others_do_not(run_dir: RunDir) -> None:
    tasks = TaskSet([{"id": str(k), "source": "math" if k else "code"} for k in range(2)], "")
    files.publish(run_dir.iteration_json(3), json.dumps({"tasks": [0, 1, 1, 1, 1, 0]}).encode())
    given = build({"trainer.sources.math.weight": 4})
    ensure_batch(run_dir, 3, given, tasks=tasks)
    batch = Batch.decode((run_dir.batch(3) / "batch.safetensors").read_bytes())
    for slot, weight in enumerate([1, 4, 4, 4, 4, 1]):
        assert sorted(batch.advantages[batch.slots == slot]) == [-0.5 * weight, 0.5 * weight]
        assert {batch.source_names[k] for k in batch.sources[batch.slots == slot]} == {
            tasks.tasks[weight > 1]["source"]
        }
    made_by = json.loads((run_dir.batch(3) / "batch.json").read_text())["made_by"]
    assert made_by["trainer.sources"]["math"]["weight"] == 4 and made_by["rollout.ratio_field"] == "source"
    _, about = make(run_dir, 3)
    assert "trainer.sources" not in about["made_by"], "batches of before this setting stay as they are"
    run_dir.iteration_json(3).unlink()
    with pytest.raises(Incomplete, match="is missing or damaged"):
        ensure_batch(run_dir, 3, given, tasks=tasks)
