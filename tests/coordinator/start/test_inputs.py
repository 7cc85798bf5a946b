"""What is refused before a node takes part, and what the first start of a run chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coordinator.settings import loading
from coordinator.settings.tree import SettingsError
from coordinator.start import eval_tasks, inputs, run_json, start
from coordinator.start.request import StartRequest
from rollout.engines.admin import EngineAdmin
from rollout.engines.kinds import embedded, vllm_installed
from rollout.rewards.resolve import resolve_reward
from rollout.tasks.task_set import TaskError, load_tasks
from tests.models import make_model


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: False)


@pytest.mark.usefixtures("no_vllm")
def test_vllm_that_is_not_installed_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match="--engine vllm: vLLM is not installed") as refused:
        inputs.load_inputs(loading.build({"engine.kind": "vllm"}), {})
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(
    "given", [{"engine.url": "http://127.0.0.1:8000"}, {"rl_phase": "update"}, {"engine.kind": "torch"}]
)
def test_node_that_starts_no_vllm_needs_none(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineAdmin, "check", lambda _admin: None)
    inputs.load_inputs(loading.build({"engine.kind": "vllm", **given}), {})


def test_run_that_never_evaluates_needs_no_rows_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_few(_source: str, **_given: Any) -> None:
        raise TaskError("gives no eval task out of 3 rows")

    monkeypatch.setattr(eval_tasks, "load_tasks", too_few)
    assert eval_tasks.load_eval_tasks(loading.build({"eval.interval": 0})) is None
    for given in ({}, {"rollout_split": "eval-only", "rl_phase": "rollout", "eval.interval": 0}):
        with pytest.raises(SettingsError, match="no eval task"):
            eval_tasks.load_eval_tasks(loading.build(given))


def test_gpus_that_replicas_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: True)
    settings = loading.build({"engine.kind": "vllm", "engine.tensor_parallel_size": 2})
    with pytest.raises(SettingsError, match=r"tensor_parallel_size=2 does not divide the 3 GPUs"):
        inputs.load_inputs(settings, {})


@pytest.mark.parametrize(
    ("gpus", "given", "words"),
    [
        ("", {"engine.dtype": "bfloat16"}, "engine.dtype=bfloat16 .* or give trainer.compute_dtype=bfloat16"),
        ("", {"engine.kind": "vllm", "engine.args.dtype": "auto"}, "leave engine.args.dtype out"),
        (
            "0",
            {"engine.kind": "vllm", "engine.args.dtype": "float16"},
            "weights in bfloat16 and float16, and training",
        ),
        ("0", {"engine.kind": "torch", "trainer.save_dtype": "float32"}, "training with weights in bfloat16"),
    ],
)
def test_engine_and_trainer_that_would_round_weights_differently_are_refused(
    gpus: str, given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: True)
    with pytest.raises(SettingsError, match=words) as refused:
        inputs.load_inputs(loading.build(given), {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "given"),
    [
        ("", {"engine.dtype": "float32"}),
        ("", {"engine.dtype": "bfloat16", "trainer.save_dtype": "bfloat16"}),
        ("", {"engine.kind": "vllm", "trainer.save_dtype": "bfloat16"}),
        ("", {"engine.dtype": "bfloat16", "trainer.compute_dtype": "bfloat16"}),
        ("", {"engine.dtype": "float64", "trainer.compute_dtype": "bfloat16"}),
        ("", {"engine.dtype": "bfloat16", "rl_phase": "rollout"}),
        ("0", {"engine.kind": "vllm", "trainer.save_dtype": "float32"}),
        ("0", {"engine.kind": "vllm", "engine.args.dtype": "float32"}),
        ("0", {"engine.kind": "torch"}),
    ],
)
def test_engine_that_rounds_as_training_does_is_taken(
    gpus: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: True)
    inputs.load_inputs(loading.build(given), {})


def test_large_model_on_gpus_without_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: False)
    given = {"model": str(make_model(tmp_path / "model", seed=0))}
    inputs.load_inputs(loading.build(given), {})
    monkeypatch.setattr(embedded, "SLOW_PARAMETERS", 1000)
    with pytest.raises(
        SettingsError, match=r"2 GPUs but no vLLM, .* pip install -e '.\[vllm\]', or give --eng"
    ):
        inputs.load_inputs(loading.build(given), {})
    inputs.load_inputs(loading.build({**given, "engine.kind": "torch"}), {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    inputs.load_inputs(loading.build(given), {})


# ---- how often the optimizer's state is saved


def test_first_start_records_how_often_the_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", seed=0)
    given = {"model": str(model), "engine.kind": "torch"}
    parameters = inputs.load_inputs(loading.build(given), given).state_bytes / inputs.STATE_BYTES
    assert parameters == sum(tensor.size for tensor in load_file(model / "model.safetensors").values())
    monkeypatch.setattr(run_json, "SAVED_EVERY", ((parameters * inputs.STATE_BYTES, 20), (parameters, 10)))

    def start_in(name: str) -> start.NodeStart:
        return start.start_master(StartRequest(tmp_path / name, overrides=given))

    first = start_in("run")
    assert first.settings.trainer.save_interval == 10
    assert json.loads(first.run_dir.run_json.read_text())["save_interval"] == 10
    monkeypatch.setattr(run_json, "SAVED_EVERY", ())  # another version of the program
    assert start_in("run").settings.trainer.save_interval == 10
    assert start_in("other").settings.trainer.save_interval == 1
    lora = {**given, "trainer.lora.rank": 2}
    assert inputs.load_inputs(loading.build(lora), lora).state_bytes == 0


@pytest.mark.parametrize(
    ("given", "run", "interval"),
    [
        ({}, {"save_interval": 10}, 10),
        ({}, {"save_interval": 1}, 1),
        ({"trainer.save_interval": 3}, {"save_interval": 10}, 3),
        ({"trainer.save_interval": 1}, {"save_interval": 10}, 1),
        ({"trainer.keep_alive": False}, {"save_interval": 10}, 1),
        ({}, {}, 1),
    ],
)
def test_what_the_user_gives_goes_before_what_the_run_has_chosen(
    given: dict[str, Any], run: dict[str, int], interval: int
) -> None:
    settings = start.with_save_interval(loading.build(given), run)
    assert settings.trainer.save_interval == settings.trainer.state_interval == interval


# ---- prompts


def chat(name: str, text: str, *before: dict[str, str]) -> dict[str, Any]:
    return {"id": name, "messages": [*before, {"role": "user", "content": text}], "answer": "3"}


def file_of(path: Path, *tasks: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return str(path)


def test_tasks_with_longer_prompts_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's tokens are characters, and its template writes `user 1+2\\na ` of a task."""
    tasks = [
        chat("a", "1+2"),
        chat("b", "1" * 23),
        chat("c", "1" * 22),
        {"id": "d", "prompt": "1" * 31, "answer": "3"},
    ]
    given = {
        "model": str(make_model(tmp_path / "model", seed=0)),
        "tasks": file_of(tmp_path / "t.jsonl", *tasks),
        "rollout.max_prompt_tokens": 30,
    }
    loaded = inputs.load_inputs(loading.build(given), given)
    assert [task["id"] for task in loaded.tasks.tasks] == ["a", "c"]
    assert [task["id"] for task in loaded.tasks.tasks[1:]] == ["c"] and loaded.tasks.place(1).endswith(":3")
    (text,) = [record.getMessage() for record in caplog.records if "max_prompt" in record.getMessage()]
    assert text.startswith("rollout.max_prompt_tokens=30: 2 of 4 tasks have longer prompts and are left out")
    assert text.endswith("t.jsonl:2 (31 tokens or more)")
    alone = load_tasks(file_of(tmp_path / "c.jsonl", tasks[0], tasks[2]), seed=0, split="train")
    assert loaded.tasks.digest == alone.digest
    with pytest.raises(
        SettingsError, match=r"=5: all 4 prompts of --tasks .* the shortest has 11 tokens or more;"
    ):
        inputs.load_inputs(loading.build({**given, "rollout.max_prompt_tokens": 5}), given)


def test_tasks_to_evaluate_on_with_longer_prompts_are_left_out_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = [chat("a", "1+2"), chat("b", "1" * 23)]
    given = {
        "model": str(make_model(tmp_path / "model", seed=0)),
        "tasks": file_of(tmp_path / "t.jsonl", chat("c", "1+3")),
        "eval_tasks": file_of(tmp_path / "e.jsonl", *mixed),
        "eval.sets.long.tasks": file_of(tmp_path / "s.jsonl", *mixed),
        "rollout.max_prompt_tokens": 30,
    }
    settings = loading.build(given)
    loaded = inputs.load_inputs(settings, given)
    assert loaded.eval_tasks is not None
    ids = [
        [task["id"] for task in each.tasks] for each in (loaded.eval_tasks, loaded.eval_sets["long"].tasks)
    ]
    assert ids == [["a"], ["a"]]
    assert sum("1 of 2 tasks have longer prompts" in record.getMessage() for record in caplog.records) == 2
    assert loaded.renewed(settings, {}).codes() == loaded.codes(), "a worker that takes them anew"
    Path(given["eval.sets.long.tasks"]).write_text(json.dumps(mixed[1]))
    with pytest.raises(SettingsError, match=r"all 1 prompts of eval.sets.long.tasks=.* are longer"):
        inputs.load_inputs(settings, given)


def test_system_prompt_begins_each_conversation_without_one_and_is_part_of_what_a_run_is_of(
    tmp_path: Path,
) -> None:
    system = {"role": "system", "content": "add."}
    tasks = file_of(tmp_path / "t.jsonl", chat("a", "1+2"), chat("b", "3+4", system))
    given = {"tasks": tasks, "eval_tasks": tasks, "rollout.system_prompt": "be kind."}
    settings = loading.build(given)
    loaded = inputs.load_inputs(settings, given)
    assert loaded.eval_tasks is not None
    for those in (loaded.tasks.tasks, loaded.eval_tasks.tasks):
        first = [task["messages"][0]["content"] for task in those]
        assert first == ["be kind.", "add."] and len(those[1]["messages"]) == 2
    without = loading.build({name: value for name, value in given.items() if "system" not in name})
    run = {"fixed": run_json.fixed_of(settings, loaded)}
    with pytest.raises(
        SettingsError, match=r"t\.jsonl, but .*t\.jsonl with rollout\.system_prompt='be kind\.';"
    ):
        run_json.refuse_changes(run, run_json.fixed_of(without, inputs.load_inputs(without, {})))


@pytest.mark.parametrize("tasks", ["builtin:arithmetic", "t.jsonl"])
def test_system_prompt_of_plain_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path / "t.jsonl", chat("a", "1+2"), {"prompt": "1+2=", "answer": "3"})
    settings = loading.build({"tasks": tasks, "rollout.system_prompt": "be kind"})
    with pytest.raises(
        SettingsError, match=r"^(builtin:arithmetic|t\.jsonl:2): rollout\.system_prompt begins conv"
    ):
        inputs.load_inputs(settings, {})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"rollout.environment": "gym:a:b", "rollout.system_prompt": "x"},
            "that program writes its messages",
        ),
        ({"rollout.max_prompt_tokens": 5}, "--model builtin:tiny: its tokenizer is not made yet"),
    ],
)
def test_prompts_that_cannot_be_changed_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        loading.build(given)


def test_code_in_a_file_is_named_so_that_a_node_finds_it_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def score(task, completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    given = {
        "rollout.reward": ["mine.py:score=2", "exact", "no.py:score"],
        "rollout.environment": "mine.py:play",
        "eval.sets": {"a": {"reward": "mine.py:score", "environment": None}},
        "rollout.rewards": {"math": ["mine.py:score", "exact"]},
        "rollout.rewards.code": "mine.py:score",
    }
    assert start.absolute(given) == {
        "rollout.reward": f"{tmp_path}/mine.py:score=2 + exact + no.py:score",
        "rollout.environment": f"{tmp_path}/mine.py:play",
        "eval.sets": {"a": {"reward": f"{tmp_path}/mine.py:score", "environment": None}},
        "rollout.rewards": {"math": f"{tmp_path}/mine.py:score + exact"},
        "rollout.rewards.code": f"{tmp_path}/mine.py:score",
    }
    assert resolve_reward(f"{tmp_path}/mine.py:score").title == "mine.py:score"
