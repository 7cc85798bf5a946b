"""Evaluation on named sets, by real nodes; and `run eval`, which scores a checkpoint alone."""

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from tests.cluster.cluster import FAST, REPOSITORY, Cluster
from tests.commands import run_forked
from tests.coordinator.examples import tree


def write_tasks(path: Path, count: int) -> str:
    """Tasks of two sources, for the reward `length`."""
    tasks = [{"prompt": f"{k}+{k}=", "target_length": 2 + k % 5, "source": "ab"[k % 2]} for k in range(count)]
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return str(path)


def of_set(name: str, tasks: str, **more: Any) -> Sequence[str]:
    return [f"eval.sets.{name}.{key}={value}" for key, value in {"tasks": tasks, **more}.items()]


def means(cluster: Cluster, iteration: int, name: str) -> Mapping[str, float]:
    """The mean reward of each group of a set, by the task's id, from the samples on disk."""
    return {
        group.task_id: sum(sample.reward or 0.0 for sample in group.samples) / len(group.samples)
        for group in cluster.groups(iteration, "eval").values()
        if group.task_id.startswith(f"{name}/")
    }


def test_each_set_has_its_own_score_and_sets_come_and_go_between_two_starts(
    cluster: Cluster, engine_url: str, tmp_path: Path
) -> None:
    engine = ("--engine-url", engine_url)
    sampled = (*FAST, *engine, "--rl-phase", "rollout", "eval.interval=1", "eval.max_tasks=8")

    short = of_set("short", write_tasks(tmp_path / "short.jsonl", 6), reward="length", samples_per_task=3,
                   temperature=1)  # fmt: skip
    cluster.start(0, "--num-nodes", "2", *sampled, *short, "--iterations", "1")
    cluster.start(1, *engine)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert "8 + 6 short to evaluate every iteration" in cluster.output(0)

    manifest, (line,) = cluster.manifest(1, "eval"), cluster.metrics()
    assert manifest["slots"] == 14 and manifest["sets"]["short"]["slots"] == [8, 14]
    groups = cluster.groups(1, "eval")
    assert [len(groups[slot].samples) for slot in sorted(groups)] == [1] * 8 + [3] * 6
    scores, score = means(cluster, 1, "short"), line["eval"]["short"]
    assert scores.keys() == {f"short/{k}" for k in range(1, 7)}
    assert score["reward"] == pytest.approx(sum(scores.values()) / 6)
    error = math.sqrt(sum((mean - score["reward"]) ** 2 for mean in scores.values()) / 5 / 6)
    assert score["error"] == pytest.approx(error) and error > 0
    assert (score["tasks"], score["samples"]) == (6, 18)
    odd = [scores[f"short/{k}"] for k in (1, 3, 5)]
    assert score["reward_by_source"]["a"] == pytest.approx(sum(odd) / 3, abs=1e-6)
    own = [sample.reward or 0.0 for slot in range(8) for sample in groups[slot].samples]
    assert line["eval_reward"] == pytest.approx(sum(own) / 8), "named sets leave eval_reward as it is"

    del cluster.nodes[1]  # the run goes on with one node

    def run(*words: str) -> None:
        assert cluster.run(1, *sampled, *words) == [0], cluster.everything_said()

    # One more set, and one less.
    new = of_set("new", write_tasks(tmp_path / "new.jsonl", 3), reward="length")
    run(*new, "--reset-settings=eval.sets.short", "--iterations", "2")
    assert cluster.metrics()[1]["eval"].keys() == {"new"}
    run("--reset-settings=eval.sets", "--iterations", "3")
    last = cluster.metrics()[2]
    assert "eval" not in last and last["eval_reward"] is not None
    assert "eval_sets" not in json.loads(cluster.run_dir.iteration_json(3).read_bytes())


def evaluated(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked(["eval", *words], REPOSITORY, cluster.environment)


def test_checkpoint_is_scored_alone_as_the_run_has_scored_it_and_the_run_stays_as_it_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 7)
    named = of_set("short", tasks, reward="length", max_tokens=3)
    assert cluster.run(1, *FAST, "eval.interval=1", *named, "--iterations", "2") == [0]
    of_run = cluster.metrics()[1]
    assert of_run["policy_iteration"] == 1
    (log,) = cluster.run_dir.logs(0).glob("node*.log")
    text = f"written after the last evaluation; to score it too: run eval --log-path {cluster.root}\n"
    assert log.read_text().endswith(text)
    before = {name: (cluster.root / name).stat().st_mtime_ns for name in tree(cluster.root)}
    root = str(cluster.root)

    ended = evaluated(
        cluster, "--checkpoint", "1", "--log-path", root, "--json", "-o", str(tmp_path / "kept")
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["checkpoint"] == str(cluster.run_dir.checkpoint(1))
    assert said["sets"]["short"]["reward"] == of_run["eval"]["short"]["reward"]
    assert said["sets"]["eval"]["reward"] == of_run["eval_reward"]
    low, high = said["sets"]["short"]["interval"]
    assert low < said["sets"]["short"]["reward"] < high
    kept = RunDir(tmp_path / "kept")
    assert said["log_path"] == str(kept.root) and f"writes to {kept.root}" in ended.stderr
    assert (kept.trajectories("eval", 1) / "groups.jsonl").exists()

    # A directory needs no run; nothing is kept.
    model = str(cluster.run_dir.checkpoint(2))
    ended = evaluated(cluster, "--checkpoint", model, "--eval-tasks", tasks, "--reward", "length")
    assert ended.returncode == 0, ended.stderr
    header, row, *_ = ended.stdout.splitlines()[2:]
    assert header.split() == ["set", "tasks", "samples", "score", "length", "truncated"]
    assert ended.stdout.splitlines()[-1].endswith(
        "--reward length -o DIR keeps them, for run samples --log-path DIR"
    )
    assert "writes to" not in ended.stderr and "run status" not in ended.stderr and "model " in ended.stderr
    assert row.split()[:3] == ["eval", "7", "7"] and "\N{PLUS-MINUS SIGN}" in row
    assert {name: (cluster.root / name).stat().st_mtime_ns for name in tree(cluster.root)} == before


def test_evaluation_that_cannot_begin_says_why_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "model").mkdir()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": ""}\n')
    for words, text in (
        (["--checkpoint", "3"], "add --log-path DIR"),
        (["--checkpoint", str(tmp_path / "none")], "no such directory"),
        (["--log-path", str(cluster.root)], "no run there"),
        (["--checkpoint", str(tmp_path / "model")], "no tasks to evaluate on; give --eval-tasks FILE"),
        (["--checkpoint", str(tmp_path / "model"), "--eval-tasks", str(bad)], f"{bad}:1: `prompt` must be"),
    ):
        ended = evaluated(cluster, *words, "-o", str(out))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert text in ended.stderr.splitlines()[-1] and not out.exists()
