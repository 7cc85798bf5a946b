"""What a metrics line says of speed and of samples."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory import manifests, parts
from coordinator.journal.tracker_feed import scalars
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import metrics
from coordinator.protocol.phase import Phase
from coordinator.settings import loading
from rollout.quota import Quota
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN, group, run_dir_at, write_json


def line_of(
    tmp_path: Path, epochs: list[int], engines_s: tuple[float, ...] = (), **iteration: Any
) -> dict[str, Any]:
    """The metrics of an iteration whose rollout ended in epoch 3, with parts of these epochs; `engines_s`:
    how long each node waited for its engine.
    """
    run_dir = run_dir_at(tmp_path)
    document = {
        "tokens": 600,
        "samples": 100,
        "given_up": [],
        "parts": [{"epoch": epoch} for epoch in epochs],
    }
    write_json(run_dir.manifest("train", 1), document)
    label = Phase.TRAIN_ROLLOUT.label
    times: dict[str, Any] = {"phase_s": {label: 2.0}, "ended_in": {label: 3}}
    settings = SimpleNamespace(kind="both")
    record = SimpleNamespace(epoch=4)
    node = SimpleNamespace(run_dir=run_dir, settings=settings, record=record, idle_s=0.0)
    payload = {"work_s": 1.0, "wait_s": 1.0}
    payloads = {rank: {**payload, "engine_s": engine_s} for rank, engine_s in enumerate(engines_s)}
    return metrics._metrics(cast(Node, node), Iteration(1, **times, **iteration), payloads or {0: payload})


def test_line_says_speed_and_length_of_what_was_generated(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[3, 3])
    assert (line["tokens_per_s"], line["length"]) == (300.0, 6.0)


def test_the_start_of_the_first_engine_is_no_part_of_the_speed(tmp_path: Path) -> None:
    assert line_of(tmp_path / "a", epochs=[3, 3], engines_s=(1.9, 1.5))["tokens_per_s"] == 1200.0
    nothing_left = line_of(tmp_path / "b", epochs=[3, 3], engines_s=(2.0,))
    assert nothing_left["tokens_per_s"] is None


def test_seconds_count_what_was_interrupted_and_those_of_the_rows_do_not(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[3, 3], begun_s=time.monotonic() - 50.0)
    assert 50.0 <= line["seconds"] < 60.0
    assert line["phase_seconds"] == {"train_rollout": 2.0}


def test_the_row_that_verifies_the_last_checkpoint_is_no_interruption(tmp_path: Path) -> None:
    now_s = time.monotonic()
    line = line_of(tmp_path, epochs=[3, 3], begun_s=now_s - 10.0, phase_begun_s=now_s - 8.0)
    assert "interrupted" not in metrics.summary(line, 1)


def test_line_of_an_iteration_says_for_how_long_it_was_interrupted() -> None:
    line = {"iteration": 3, "reward": 0.5, "eval_reward": None, "loss": None, "busy_fraction": 0.99}
    held = line | {"seconds": 55.0, "phase_seconds": {"train_rollout": 9.0, "training": 6.0}}
    said = "iteration 3/8 | reward 0.500 | 55.0 s, 40.0 s of them interrupted or before a restart"
    assert metrics.summary(held, 8) == f"{said} | nodes busy 99 % of the rest"
    hardly = line | {"seconds": 55.0, "phase_seconds": {"train_plan": 0.2}}
    assert metrics.summary(hardly, 8).endswith("54.8 s of them interrupted or before a restart")
    whole = line | {"seconds": 55.0, "phase_seconds": {"train_rollout": 49.0, "training": 5.5}}
    assert metrics.summary(whole, 8) == "iteration 3/8 | reward 0.500 | 55.0 s | nodes busy 99 %"
    assert metrics.summary(whole, 8, with_reward=False) == "iteration 3/8 | 55.0 s | nodes busy 99 %"
    measured = {
        "length": 311.6,
        "truncated": 0.03125,
        "loss": 0.0412,
        "entropy": 0.523,
        "tokens_per_s": 1434.4,
    }
    told = "length 312, 3 % cut | loss 0.0412 | entropy 0.52 | 1,434 tok/s"
    assert told in metrics.summary(whole | measured, 8)
    uncut = metrics.summary(whole | measured | {"length": 5.0, "truncated": 0.0}, 8)
    assert "length 5 |" in uncut


def test_training_is_told_by_source_whatever_the_source_is_called() -> None:
    trained = {
        "loss": 0.5,
        "loss_by_source.a.b": 0.25,
        "loss_by_source.math": 1.0,
        "entropy_by_source.a.b": 2.0,
    }
    assert metrics._trained_by_source(trained) == {
        "loss_by_source": {"a.b": 0.25, "math": 1.0},
        "entropy_by_source": {"a.b": 2.0},
        "kl_engine_by_source": None,
        "kl_reference_by_source": None,
    }


def test_worker_says_what_it_has_made_and_how_busy_it_was(caplog: pytest.LogCaptureFixture) -> None:
    label, opened = Phase.TRAIN_ROLLOUT.label, {"opened": {"sampling": {"n": 8}}}
    iteration = Iteration(3, phase_s={label: 3.0, "training": 1.1}, work_s={label: 2.4, "training": 1.0})
    iteration.documents[Phase.ITERATION_START] = opened
    iteration.progress = {"done": 42, "samples": 0, "tokens_per_s": 1434.4}
    with caplog.at_level("INFO"):
        for is_master in (True, False):
            node = cast(Node, SimpleNamespace(is_master=is_master))
            assert metrics.report_timings(node, iteration) == {"work_s": 3.4, "wait_s": pytest.approx(0.7)}
    assert caplog.messages == ["iteration 3 | 42 groups, 336 samples | 1,434 tok/s | 4.1 s | busy 83 %"]
    iteration.progress["samples"] = 330
    assert "42 groups, 330 samples" in metrics.summary_of_node(iteration, 3.4, 4.1)
    assert metrics.summary_of_node(Iteration(4), 0.0, 2.0) == "iteration 4 | 2.0 s | busy 0 %"


def test_engine_that_computes_another_policy_than_the_trainer_is_told_of() -> None:
    line = {"age_max": 0, "effective_samples": 0.05, "kl_engine": 1.8}
    settings = loading.build({"engine.kind": "vllm", "engine.args.dtype": "bfloat16"})
    said = str(metrics.disagreement(line, settings))
    assert "do not agree" in said
    assert (
        "computes with bfloat16 (engine.args.dtype), the trainer with float32 (trainer.compute_dtype" in said
    )
    rounded = {**line, "effective_samples": 0.97, "kl_engine": 0.107}
    assert metrics.disagreement(rounded, settings) is not None, "an engine that rounds updates away"
    assert metrics.disagreement({**rounded, "kl_engine": 0.01}, settings) is None
    assert metrics.disagreement({**line, "age_max": 2}, settings) is None, "older policies have sampled"
    coarse = loading.build({"trainer.lora.rank": 4, "trainer.lora.base_dtype": "nf4"})
    smallest = {**line, "effective_samples": 0.39, "kl_engine": 0.62}
    assert metrics.disagreement(smallest, coarse) is None, "SmolLM2-135M, as measured"
    assert "over a model in nf4" in str(metrics.disagreement(line, coarse))
    nothing = {"age_max": None, "effective_samples": None}
    assert metrics.disagreement(nothing, settings) is None, "nothing was trained"


def test_groups_of_an_epoch_before_make_no_speed(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[2, 3])
    assert (line["tokens_per_s"], line["length"]) == (None, 6.0)


def with_rewards(slot: int, *rewards: float | None, **metrics: float) -> Group:
    made = group(slot)
    first = made.samples[0]
    made.samples = [replace(first, reward=reward, metrics={}) for reward in rewards]
    made.samples[0].metrics.update(metrics)
    return made


def sampled(tmp_path: Path, groups: list[Group], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of an iteration with these groups, of which the tasks are drawn in reverse order."""
    run_dir = run_dir_at(tmp_path)
    for kind in ("train", "eval"):
        directory = run_dir.trajectories(kind, 1)  # pyright: ignore
        directory.mkdir()
        writer = parts.PartWriter(run_dir, kind, 1, 0, 1, ORIGIN)  # pyright: ignore
        for each in groups:
            writer.add(each)
        writer.flush()
        document, _ = manifests.manifest(directory, 1, Quota(len(groups), len(groups)), ORIGIN)
        write_json(run_dir.manifest(kind, 1), document)  # pyright: ignore
    drawn = list(range(len(tasks)))[::-1]
    write_json(run_dir.iteration_json(1), {"tasks": drawn})
    node = SimpleNamespace(
        run_dir=run_dir,
        settings=SimpleNamespace(kind="both", rollout=SimpleNamespace(ratio_field="source")),
        record=SimpleNamespace(epoch=1),
        idle_s=0.0,
        identity=SimpleNamespace(
            inputs=SimpleNamespace(
                tasks=SimpleNamespace(tasks=tasks), eval_tasks=SimpleNamespace(tasks=tasks[:-1])
            )
        ),
    )
    return metrics._metrics(cast(Node, node), Iteration(1), {0: {"work_s": 1.0, "wait_s": 1.0}})


def test_line_says_how_many_groups_are_flat(tmp_path: Path) -> None:
    groups = [
        with_rewards(0, 1.0, 1.0),
        with_rewards(1, 1.0, 0.0),
        with_rewards(2, 0.5, 0.5, None),
        with_rewards(3, 1.0, None),  # one reward is neither flat nor not
    ]
    assert sampled(tmp_path, groups, [{}] * 4)["flat_groups"] == 2 / 3


def test_users_own_metrics_cannot_take_the_place_of_ours(tmp_path: Path) -> None:
    groups = [with_rewards(0, 1.0, 0.0, format=1.0, reward=7.0), with_rewards(1, 0.0, 0.0, format=0.5)]
    line = sampled(tmp_path, groups, [{}] * 2)
    assert line["reward"] == 0.25
    assert line["sample_metrics"] == line["eval_sample_metrics"] == {"format": 0.75, "reward": 7.0}
    assert scalars(line)["sample_metrics/reward"] == 7.0
    assert line["reward_by_source"] is None


def test_metric_that_some_samples_lack_is_the_mean_over_the_others_whichever_part_they_are_in(
    tmp_path: Path,
) -> None:
    run_dir = run_dir_at(tmp_path)
    directory = run_dir.trajectories("train", 1)
    directory.mkdir()
    # Rank 1 has died after its first group.
    for rank, epoch, slot, measured in [(1, 1, 0, {"tries": 1.0}), (0, 2, 1, {"tries": 4.0}), (1, 2, 2, {})]:
        writer = parts.PartWriter(run_dir, "train", 1, rank, epoch, ORIGIN)
        writer.add(with_rewards(slot, 1.0, 0.0, **measured))
        writer.flush()
    document, _ = manifests.manifest(directory, 1, Quota(3, 3), ORIGIN)
    assert document["metrics"] == {"tries": 2.5}


def test_reward_is_told_apart_by_the_source_of_the_tasks(tmp_path: Path) -> None:
    groups = [with_rewards(0, 1.0, 0.0), with_rewards(1, 1.0), with_rewards(2, 0.0)]
    line = sampled(tmp_path, groups, [{"source": "sums"}, {"source": "sums"}, {"source": "riddles"}])
    assert line["reward_by_source"] == {"riddles": 0.5, "sums": 0.5}
    assert line["eval_reward_by_source"] is None, "there are fewer tasks now than were evaluated"
