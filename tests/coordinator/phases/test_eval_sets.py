"""`eval.sets.NAME`: what may be typed, what is inherited, and what is refused before anything is written."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.console.server.submission import _refuse_code
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.keeping.old_checkpoints import checkpoints_to_keep
from coordinator.phases.eval_sets import scores
from coordinator.settings import loading
from coordinator.settings.keeping import CheckpointSettings
from coordinator.settings.settings_file import read_file
from coordinator.settings.tree import SettingsError
from coordinator.start.request import StartRequest
from coordinator.start.start import absolute, check_master
from tests.coordinator.examples import group, tombstone

TASK = '{"prompt": "1+2=", "answer": "3"}\n'


def built(*words: str, **given: Any) -> Any:
    return loading.build({**given, **dict(map(loading.parse_override, words))})


def test_set_inherits_from_the_evaluation_and_then_from_the_rollout() -> None:
    settings = built(
        "eval.sets.b.tasks=b.jsonl",
        "eval.sets.a.tasks=a.jsonl",
        "eval.sets.a.reward=numeric",
        "eval.sets.a.columns.prompt=question",
        "eval.temperature=0.5",
        "eval.top_k=20",
        "eval.sets.b.top_k=0",
        "eval.samples_per_task=4",
        "rollout.max_tokens=77",
        "rollout.environment=calculator",
        'columns={"prompt": "q"}',
        tasks="t.jsonl",
    )
    first, second = settings.eval_sets.values()
    assert list(settings.eval_sets) == ["a", "b"]
    assert (first.top_k, second.top_k) == (20, 0)
    assert (first.reward, second.reward) == ("numeric", "exact")
    assert (first.columns, second.columns) == ({"prompt": "question"}, {"prompt": "q"})
    for one in (first, second):
        assert (one.temperature, one.samples_per_task, one.max_tokens, one.top_p) == (0.5, 4, 77, 1.0)
        assert (one.environment, one.success, one.max_tasks) == ("calculator", 1.0, 512)


def test_demonstrations_are_not_what_a_policy_is_measured_by() -> None:
    settings = built("eval.sets.a.tasks=a.jsonl", **{"trainer.algorithm": "sft"})
    assert settings.rollout.environment == "demonstration"
    assert settings.eval_sets["a"].environment == "single_turn"


def test_settings_file_and_command_line_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    text = '[eval.sets.a]\ntasks = "t.jsonl"\ntemperature = 0.5\n\n[eval.sets.a.columns]\nprompt = "q"\n'
    file.write_text(text)
    typed = ["eval.sets.a.tasks=t.jsonl", "eval.sets.a.temperature=0.5", "eval.sets.a.columns.prompt=q"]
    assert loading.build(read_file(file)) == built(*typed)


@pytest.mark.parametrize("is_table", [True, False])
def test_path_of_a_set_is_found_from_any_directory(
    is_table: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(TASK)
    given = {"eval.sets": {"a": {"tasks": "t.jsonl"}}} if is_table else {"eval.sets.a.tasks": "t.jsonl"}
    settings = loading.build(absolute(given))
    assert settings.eval.sets["a"].tasks == str(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a.reward=math"], "eval.sets.a.tasks is missing; give the tasks of the set"),
        (["a=t.jsonl"], "eval.sets.a.tasks is missing; give the tasks of the set"),
        (["a.tasks=none.jsonl"], "eval.sets.a.tasks=none.jsonl: no such file"),
        (["a.tasks=empty.jsonl"], "empty.jsonl: holds no task"),
        (
            ["a.tasks=t.jsonl", "a.rewards=x"],
            "unknown setting eval.sets.a.rewards; a set has tasks, columns, rew",
        ),
        (["a.tasks=t.jsonl", "a.reward=nope"], "eval.sets.a.reward=nope: reward 'nope': there is exact"),
        (["a.tasks=t.jsonl", "a.environment=nope"], "eval.sets.a.environment=nope: environment 'nope'"),
        (["a.tasks=t.jsonl", "a.temperature=-1"], "eval.sets.a.temperature=-1: "),
        (["a.tasks=t.jsonl", "a.max_tokens=4096"], "eval.sets.a.max_tokens=4096 leaves no room for a prompt"),
        (
            ["a.tasks=t.jsonl", "a.reward=length"],
            "t.jsonl:1: eval.sets.a.reward length cannot score this task",
        ),
        (
            ["a.tasks=builtin:arithmetic", "a.columns.prompt=q"],
            "names a column of data, but eval.sets.a.tasks",
        ),
        (["a/b.tasks=t.jsonl"], "eval.sets.a/b: name a set with letters"),
        (["a.b.tasks=t.jsonl"], "eval.sets.a.tasks is missing"),
    ],
)
def test_bad_set_is_refused_in_one_line_and_nothing_is_written(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(TASK)
    (tmp_path / "empty.jsonl").write_text("")
    typed = [f"eval.sets.{word}" for word in words]
    monkeypatch.setattr("sys.argv", ["run", "--master", "--log-path", str(tmp_path / "run"), *typed])
    assert main() == 2
    said = capsys.readouterr().err
    assert text in said
    assert not (tmp_path / "run").exists()


def test_best_checkpoint_is_that_of_a_set_which_is_there() -> None:
    with pytest.raises(SettingsError, match=r"checkpoints\.best_by=b is not among eval\.sets \(a\)"):
        built("eval.sets.a.tasks=a.jsonl", "checkpoints.best_by=b")


def test_best_by_a_set_keeps_other_checkpoints_than_the_best_by_all(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    of_set = {1: 0.9, 2: 0.1, 3: 0.2, 4: None}
    lines = [
        {
            "iteration": policy + 1,
            "kind": "both",
            "reward": 0.0,
            "eval_reward": policy / 10,
            **({"eval": {"hard": {"reward": of_set[policy]}}} if of_set[policy] is not None else {}),
        }
        for policy in of_set
    ]
    run_dir.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = CheckpointSettings(keep_last=2, keep_best=1, best_by="hard")
    score = FinishedIterations(run_dir, keeps_scores=True, by="hard").look().score
    assert checkpoints_to_keep([1, 2, 3, 4, 5, 6], score, settings) == {1, 5, 6}
    assert score(4) is None, "eval_reward does not stand in for a set that was not evaluated"
    by_all = FinishedIterations(run_dir, keeps_scores=True).look().score
    assert checkpoints_to_keep([1, 2, 3, 4, 5, 6], by_all, settings) == {4, 5, 6}


def test_server_that_takes_no_code_takes_none_in_a_set() -> None:
    for word in ("reward=os:system", "environment=os:system"):
        settings = built("eval.sets.a.tasks=a.jsonl", f"eval.sets.a.{word}")
        with pytest.raises(SettingsError, match=r"eval\.sets\.a\.\w+ os:system runs code"):
            _refuse_code(settings)


def test_training_tasks_in_what_is_evaluated_are_warned_of_alike_in_sets_and_eval_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [{"prompt": f"{k}+2=", "answer": "3"} for k in range(6)]
    for name, those in {"train": tasks[:4], "some": tasks[3:], "same": tasks[1:3]}.items():
        lines = [json.dumps({"id": f"{name}{k}", **task}) for k, task in enumerate(those)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    given = {"tasks": str(tmp_path / "train.jsonl"), "model": "builtin:tiny"}

    for key, title in {"eval.sets.a.tasks": "eval.sets.a", "eval_tasks": "--eval-tasks"}.items():
        for name, text in {"some": "1 of 3", "same": "all 2"}.items():
            caplog.clear()
            evaluated = {key: str(tmp_path / f"{name}.jsonl"), "eval.interval": 1}
            with caplog.at_level(logging.WARNING):
                check_master(StartRequest(tmp_path / "run", overrides={**given, **evaluated}))
            (said,) = [record.getMessage() for record in caplog.records if "too" in record.getMessage()]
            assert said.startswith(
                f"{title}: {text} tasks are training tasks too, e.g. {tmp_path}/{name}.jsonl:1"
            )


def test_set_without_any_score_leaves_the_others_theirs_and_no_mean_of_all() -> None:
    code = {"name": "exact", "digest": "d" * 16}
    sampling = {"n": 1, "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "stop": []}
    of_both = {"tasks": "t", "sampling": sampling, "reward": code, "environment": code, "success": 1.0}
    opened = {
        "eval_sets": [
            {"name": "a", "begin": 0, "end": 2, **of_both},
            {"name": "b", "begin": 2, "end": 4, **of_both},
        ]
    }
    tasks = SimpleNamespace(tasks=SimpleNamespace(tasks=[{"id": "0"}, {"id": "1"}]))
    inputs: Any = SimpleNamespace(eval_sets={"a": tasks, "b": tasks})
    settings = built()
    lost = [group(0, (1.0,)), group(1, (0.0,)), tombstone(2), tombstone(3)]
    document = scores(lost, opened, settings, inputs)
    assert document["sets"]["a"]["reward"] == 0.5 and "reward" not in document["sets"]["b"]
    assert document["sets"]["b"]["given_up"] == 2 and document.get("reward") is None
    whole = scores([*lost[:2], group(2, (1.0,)), group(3, (1.0,))], opened, settings, inputs)
    assert whole["reward"] == 0.75
