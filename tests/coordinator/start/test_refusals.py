"""What certainly cannot work is refused before the start, in one line; what may work passes."""

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from coordinator.console.commands.evaluate import as_typed
from coordinator.machine.filesystems import Mount
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start import refusals_of_models, refusals_of_tasks, texts_of_tasks
from coordinator.start.dry_run import check_named
from coordinator.start.eval_tasks import RunTasks
from coordinator.start.inputs import load_inputs
from coordinator.start.log_path import check_log_path, check_new_run, warn_of_own_disk
from coordinator.start.request import StartRequest
from coordinator.start.start import start_master
from rollout.engines.answers import GENERATE
from rollout.engines.kinds import by_url
from rollout.engines.kinds.by_url import ByUrl
from rollout.engines.kinds.choice import any_kind
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.kind import ServerSettingError
from rollout.engines.kinds.vllm import Vllm
from rollout.settings import TINY, EngineSettings
from rollout.tasks.task_set import SHAPES, load_tasks
from tests.coordinator.examples import write_json
from tests.models import write_model
from tests.rollout.environments.test_try_tasks import model_of
from tests.rollout.rewards.test_served import Served, served
from trainer.settings import TrainerSettings

__all__ = ["served"]
CHAT = {"messages": [{"role": "user", "content": "1+2?"}], "answer": "3"}


def tasks_at(path: Path, *tasks: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return str(path)


def refusal(given: dict[str, Any]) -> str:
    """The line with which these settings are refused."""
    with pytest.raises(SettingsError) as refused:
        load_inputs(loading.build(given), given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def passes(given: dict[str, Any]) -> None:
    load_inputs(loading.build(given), given)


# ---- the model


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/iteration_000004", "peft"])
def test_adapter_is_refused_with_the_command_that_makes_a_model_of_it(tmp_path: Path, place: str) -> None:
    for directory in (tmp_path / "run/checkpoints/iteration_000004", tmp_path / "peft"):
        write_json(directory / "adapter_config.json", {})
    write_json(tmp_path / "run/run.json", {})
    given = {"model": str(tmp_path / place), "tasks": "builtin:arithmetic"}
    text = refusal(given)
    command = f"run export --merge --iteration 4 --log-path {tmp_path}/run -o DIR"
    if place == "peft":
        command = f"python -m trainer.checkpoint.merge {tmp_path}/peft DIR (or peft's merge_and_unload)"
    assert f"is an adapter; first add it to its base model: {command}; then give --model DIR" in text
    with pytest.raises(SettingsError, match=re.escape(text)):
        check_named(loading.build(given), given)


# ---- tasks and their reward


def test_first_task_without_an_answer_is_named_with_the_reward_that_needs_one(tmp_path: Path) -> None:
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}, {"prompt": "2"}, {"prompt": "3"})
    text = refusal({"tasks": tasks})
    assert text.startswith(f"{tasks}:2: --reward exact cannot score this task: it has no `answer`;")
    assert refusal({"eval_tasks": tasks}).startswith(f"{tasks}:2: ")


def test_refusal_of_an_evaluation_task_names_the_columns_of_its_own_section(tmp_path: Path) -> None:
    questions = tasks_at(tmp_path / "columns.jsonl", {"question": "1", "gold": "1"})
    assert f"{questions}:1: " in refusal({"tasks": questions})
    assert "e.g. columns.messages=question (" in refusal({"tasks": questions})
    text = refusal({"eval_tasks": questions})
    assert f"{questions}:1: " in text and "e.g. eval.columns.messages=question (" in text
    text = refusal({"eval_tasks": questions, "eval.columns.prompt": "question"})
    assert "no `answer`; name its column, e.g. eval.columns.answer=COLUMN (there is gold)" in text
    text = refusal({"eval_tasks": questions, "eval.columns.prompt": "quest"})
    assert "nothing in the column 'quest' (eval.columns.prompt)" in text
    text = refusal({"eval.sets.hard.tasks": questions})
    assert "e.g. eval.sets.hard.columns.messages=question (" in text
    assert as_typed(f"eval.sets.eval.tasks={questions}: eval.sets.eval.columns.prompt=COLUMN") == (
        f"--eval-tasks {questions}: eval.columns.prompt=COLUMN"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"rollout.reward": "tests.cluster.plugins:length"},
        {"rollout.environment": "tests.cluster.plugins:slow"},
        {"rollout.reward": "regex", "rl_phase": "update"},
        {"rollout_split": "eval-only", "rl_phase": "rollout", "eval_tasks": "builtin:arithmetic"},
    ],
)
def test_task_without_an_answer_is_fine_where_nothing_built_in_scores_it(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "def reward(task, completion): return 1\nasync def play(task, policy, sampling): return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"rollout.reward": "own:reward", "rollout.environment": "own:play"}
    given = {key: own[key] if "plugins" in str(value) else value for key, value in given.items()}
    passes({"tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "2"}), **given})


def test_answer_is_not_needed_in_tasks_that_are_not_evaluated(tmp_path: Path) -> None:
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "2"})
    passes({"eval_tasks": tasks, "eval.interval": 0})
    passes({"eval_tasks": tasks, "rollout_split": "train-only"})


def test_task_of_another_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
    (tmp_path / "own_game.py").write_text("")  # it is found, and not loaded
    monkeypatch.syspath_prepend(tmp_path)
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    problem = "cannot play this task: it is not of own-game; give --tasks verifiers:own-game"
    mixed = {"tasks": tasks, "rollout.environment": "verifiers:own-game"}
    assert refusal(mixed) == f"{tasks}:1: --environment verifiers:own-game {problem}"
    alone = {"tasks": tasks, "eval.sets.new.tasks": tasks, "eval.sets.new.environment": "verifiers:own-game"}
    assert refusal(alone) == f"{tasks}:1: eval.sets.new.environment verifiers:own-game {problem}"
    passes({**mixed, "rl_phase": "update"})


# ---- evaluation


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"eval.interval": 2}, "--eval-interval 2"),
        ({"rollout_split": "eval-only", "rl_phase": "rollout"}, "--rollout-split eval-only"),
    ],
)
def test_evaluation_that_is_asked_for_needs_tasks(tmp_path: Path, given: dict[str, Any], asked: str) -> None:
    given = {"tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}), **given}
    with pytest.raises(SettingsError) as refused:
        check_named(loading.build(given), given)
    text = str(refused.value)
    assert text.startswith(f"{asked} needs tasks to evaluate on, and --tasks {given['tasks']} has none")
    assert "--eval-tasks FILE" in text
    given["eval_tasks"] = given["tasks"]
    check_named(loading.build(given), given)


@pytest.mark.parametrize(
    "given", [{}, {"eval.interval": 0}, {"eval.interval": 2, "rl_phase": "update"}, {"eval.temperature": 1.0}]
)
def test_run_that_does_not_ask_for_evaluation_needs_no_tasks_for_it(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    given = {"tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}), **given}
    check_named(loading.build(given), given)


# ---- the model


@pytest.mark.parametrize("environment", ["single_turn", "calculator", "demonstration"])
def test_messages_need_a_chat_template(tmp_path: Path, environment: str) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": 0}, tokenizer={})
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}, CHAT)
    sft = {"trainer.algorithm": "sft"} if environment == "demonstration" else {}
    given = {"model": str(model), "tasks": tasks, "rollout.environment": environment, **sft}
    text = refusal(given)
    assert text.startswith(f"{tasks}:2: this task has `messages`, but --model {model} has no chat template")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    passes(given)


def test_model_without_a_chat_template_is_fine_where_none_is_needed_or_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("async def play(task, policy, sampling): return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    chats = tasks_at(tmp_path / "chats.jsonl", CHAT)
    given = {"model": str(write_model(tmp_path / "model", tokenizer={})), "tasks": chats}
    passes({**given, "rollout.environment": "own:play"})
    passes({**given, "engine.args.chat_template": "mine.jinja"})
    passes({**given, "rl_phase": "update"})
    passes({**given, "tasks": tasks_at(tmp_path / "prompts.jsonl", {"prompt": "1", "answer": "1"})})


@pytest.mark.parametrize("key", ["rollout.max_tokens", "eval.max_tokens"])
def test_max_tokens_that_leave_no_room_for_a_prompt_are_refused(tmp_path: Path, key: str) -> None:
    given: dict[str, Any] = {
        "model": str(write_model(tmp_path / "model", {"max_position_embeddings": 64})),
        "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}),
    }
    with pytest.raises(
        SettingsError, match=rf"{key}=64 leaves no room for a prompt: .* context of 64 tokens"
    ):
        start_master(StartRequest(tmp_path / "run", overrides={**given, key: 64}))
    assert not (tmp_path / "run").exists()
    start_master(StartRequest(tmp_path / "run", overrides={**given, key: 63}))


def test_default_of_max_tokens_is_what_the_context_leaves(tmp_path: Path) -> None:
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    for context, expected in ((64, 63), (100_000, 4096), (None, 4096)):
        model = write_model(tmp_path / f"model-{context}", {"max_position_embeddings": context})
        start = start_master(
            StartRequest(tmp_path / f"run-{context}", overrides={"model": str(model), "tasks": tasks})
        )
        assert start.settings.rollout.max_tokens == expected


@pytest.mark.parametrize(
    ("args", "context"),
    [
        ({}, 64),
        ({"max-model-len": 32}, 32),
        ({"max_model_len": 128}, 128),
        ({"max-model-len": "1k"}, None),
        ({"max-model-len": -1}, None),
        ({"hf-overrides": {"max_position_embeddings": 128}}, None),
    ],
)
def test_argument_of_the_server_decides_its_context(
    tmp_path: Path, args: dict[str, Any], context: int | None
) -> None:
    model = write_model(tmp_path, {"max_position_embeddings": 64})
    assert any_kind(EngineSettings(args=args)).context(model) == context
    assert any_kind(EngineSettings(url="http://127.0.0.1:8000", args=args)).context(model) is None
    assert any_kind(EngineSettings(kind="torch", args=args)).context(model) == 64, "it takes no arguments"


@pytest.mark.parametrize("source", ["hf:a/b", ""])
def test_length_beyond_the_models_positions_is_refused_by_a_dry_run(tmp_path: Path, source: str) -> None:
    dynamic = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    given: dict[str, Any] = {
        "model": str(write_model(tmp_path / "model", dynamic)),
        "tasks": source or tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}),
        "engine.args.max_model_len": 128,
    }
    with pytest.raises(SettingsError, match=r"max_model_len=128: beyond 64 tokens .* give 64 or less$"):
        check_named(loading.build(given), given)


@pytest.mark.parametrize("source", ["hf:a/b", ""])
def test_argument_that_no_server_is_given_is_refused_where_there_is_no_vllm(
    tmp_path: Path, source: str
) -> None:
    given: dict[str, Any] = {
        "tasks": source or tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}),
        "engine.args.tensor_parallel_size": 2,
    }
    refused = pytest.raises(
        SettingsError, match=r"^engine.args.tensor_parallel_size: .* give engine.tensor_p"
    )
    with refused:
        check_named(loading.build(given), given)
    with pytest.raises((SettingsError, ServerSettingError), match=r"^engine.args.tensor_parallel_size: "):
        load_inputs(loading.build(given), given)
    check_named(loading.build(given | {"engine.kind": "torch"}), given)


def test_first_prompt_is_shown_as_the_model_gets_it(tmp_path: Path) -> None:
    template = {"chat_template": "{% for m in messages %}b {% endfor %}a"}
    model = str(write_model(tmp_path / "model", {}, template))
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"added_tokens": [], **tokenizer}))
    ask = {"role": "user", "content": "1"}
    tasks = tasks_at(tmp_path / "t.jsonl", {"messages": [ask, ask], "answer": "1"})
    given: dict[str, Any] = {"tasks": tasks, "model": model, "rl_phase": "rollout", "engine.kind": "torch"}
    assert check_named(loading.build(given), given) == ["first prompt, 3 tokens: 'b b a'"]


def test_name_of_a_model_that_a_directory_began_a_run_with_is_not_called_another(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_model(tmp_path / "data" / "Qwen3", {})
    run_dir = tmp_path / "run"
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    given = {"tasks": tasks, "model": "Qwen3", "data_path": str(tmp_path / "data")}
    start_master(StartRequest(run_dir, overrides=given))
    other = {**given, "model": "Qwen/Qwen3"}
    check_named(loading.build(other), other, run_dir)
    (tmp_path / "data" / "Qwen3").rename(tmp_path / "data" / "gone")
    with pytest.raises(SettingsError, match="--model is Qwen/Qwen3, but this run was started with Qwen3"):
        check_named(loading.build(other), other, run_dir)


def test_fewer_iterations_than_are_done_are_refused_with_how_many_to_give(tmp_path: Path) -> None:
    start_master(StartRequest(tmp_path, overrides={"iterations": 2}))
    lines = [json.dumps({"iteration": number, "kind": "both"}) for number in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    start_master(StartRequest(tmp_path, overrides={"iterations": 2}))
    refused = "--iterations 1: this run has done 2 already; give more, e.g. --iterations 4"
    with pytest.raises(SettingsError, match=refused):
        start_master(StartRequest(tmp_path, overrides={"iterations": 1}))
    given = {"iterations": 1}
    with pytest.raises(SettingsError, match=refused):
        check_named(loading.build(given), given, tmp_path)


# ---- a server of the user's


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that gives these answers by path, else 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b"not here"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


WEIGHTS = (200, b'{"weight_version": "default"}')


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({}, "/health: 404"),
        ({"/health": (200, b"<html>It works!</html>")}, "200, but no JSON: <html>It works!</html>"),
        ({"/health": (500, b"oh")}, "/health: 500: oh"),
        ({"/health": (503, b"")}, "/health: 503"),
        ({"/health": (200, b"")}, "/weight_info: 404; a vLLM server must run with VLLM_SERVER_DEV_MODE=1"),
        ({"/health": (200, b""), "/weight_info": (200, b"{}")}, "answered without 'weight_version'"),
    ],
)
def test_server_that_is_no_engine_is_refused_with_what_it_says(
    answers: dict[str, tuple[int, bytes]], reason: str
) -> None:
    with answering(answers) as url:
        text = refusal({"engine.url": url})
    assert text.startswith(f"--engine-url {url}: no engine answers there (") and reason in text


def test_server_that_is_an_engine_passes() -> None:
    with answering({"/health": (200, b""), "/weight_info": WEIGHTS}) as url:
        passes({"engine.url": url})


def test_server_that_is_not_there_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = refusal({"engine.url": f"http://127.0.0.1:{port}"})
    assert "ConnectionRefusedError" in text and "start it, and wait until it is ready" in text
    passes({"engine.url": f"http://127.0.0.1:{port}", "rl_phase": "update"})


def test_server_that_does_not_answer_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_url, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in refusal({"engine.url": f"http://127.0.0.1:{silent.getsockname()[1]}"})


def test_vllm_of_yours_that_takes_no_pictures_is_refused_for_tasks_that_show_some() -> None:
    facts = {"/server_info?config_format=json": (200, b"{}")}
    message = b'{"error": {"message": "Scale-out endpoints are disabled."}}'
    with answering({**facts, GENERATE: (403, message)}) as url:
        engine = ByUrl(EngineSettings(url=url), 0)
        with pytest.raises(ServerSettingError) as refused:
            engine.check_pictures(1)
        text = str(refused.value)
        assert (
            f"--engine-url {url}: " in text and "403: Scale-out endpoints are disabled.; start vLLM" in text
        )
    with answering({**facts, GENERATE: (200, b"{}")}) as url:
        ByUrl(EngineSettings(url=url), 0).check_pictures(1)
    ours = {"/server_info?config_format=json": (200, b'{"renders_pictures": true}')}
    with answering(ours) as url:
        ByUrl(EngineSettings(url=url), 0).check_pictures(1)


# ---- the log path


def test_log_path_below_a_directory_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=rf"no directory {tmp_path}/absent; is it mounted here\?"):
        check_log_path(tmp_path / "absent" / "run")
    check_log_path(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    check_log_path(tmp_path / "runs" / "default")  # as the default is, below the current directory
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SettingsError, match="no directory"):
        check_log_path(tmp_path / "runs" / "default")


def test_log_path_is_not_the_directory_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"is the directory of a model .*; give another directory"):
        check_log_path(tmp_path)
    (tmp_path / "run.json").write_text("{}")  # of a run that was begun there by an older version
    check_log_path(tmp_path)


def test_demonstrations_need_a_token_that_ends_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": None}, tokenizer={})
    given = {
        "model": str(model),
        "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}),
        "trainer.algorithm": "sft",
    }
    assert "names a token that ends a sequence, so an answer to train on would have no end" in refusal(given)
    passes({**given, "trainer.algorithm": "grpo"})  # it is said
    (model / "generation_config.json").write_text('{"eos_token_id": [3]}')
    passes(given)


QUANTISED = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": QUANTISED},
        {"text_config": {"quantization_config": QUANTISED}},
        {"thinker_config": {"text_config": {"compression_config": QUANTISED}}},
    ],
)
def test_quantised_model_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": 0, **config})
    given = {"model": str(model), "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})}
    assert "its weights are quantised (fp8)" in refusal(given)
    assert f"(python -m trainer.checkpoint.dequantise {model} OUT)" in refusal(given)
    (model / "config.json").write_text("{}")
    passes(given)
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        (model / name).write_text("{}")
        assert f"its weights are quantised ({method})" in refusal(given)
        (model / name).unlink()


@pytest.mark.parametrize(
    ("config", "processes", "reason"),
    [
        (
            {"num_attention_heads": 6},
            4,
            "--model MODEL has 6 attention heads, .*; give a number that divides",
        ),
        ({"layer_types": ["conv", "full_attention"]}, 4, "has layers of the kind conv, .*; give 1"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, 4, "of the kind linear_attention, "),
        ({"num_attention_heads": 8}, 6, "does not divide the 6 training processes of this node"),
    ],
)
def test_model_whose_sequences_ranks_cannot_share_is_refused(
    tmp_path: Path, config: dict[str, Any], processes: int, reason: str
) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": 0, **config})
    given = {"model": str(model), "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})}
    passes(given)
    given |= {"trainer.context_parallel": 4, "trainer.processes_per_node": processes}
    text = refusal(given)
    assert text.startswith("trainer.context_parallel=4")
    assert re.search(reason.replace("MODEL", str(model)), text)
    fitting = {"num_attention_heads": 8, "layer_types": ["sliding_attention"]}
    (model / "config.json").write_text(json.dumps({"eos_token_id": 0, **fitting}))
    passes(given | {"trainer.processes_per_node": 4})


def test_routes_are_replayed_only_of_experts_that_the_engine_records(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": 0, "num_experts": 8})
    given = {"model": str(model), "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})}
    given |= {"trainer.routing_replay": True, "engine.kind": "torch"}
    passes(given)
    settings: Any = SimpleNamespace(trainer=TrainerSettings(routing_replay=True), rl_phase="both", model="m")
    for engine, reason in (
        (Vllm(EngineSettings(), 0), "on GPUs alone"),
        (Vllm(EngineSettings(), 1), "with engine.args.enable-return-routed-experts=true alone"),
        (ByUrl(EngineSettings(url="http://h"), 1), "only engines that nodes start"),
    ):
        with pytest.raises(SettingsError, match=f"routing_replay: .*{reason}.*; "):
            refusals_of_models.refuse_unrecorded(settings, engine, model)
    asked = Vllm(EngineSettings(args={"enable_return_routed_experts": True}), 1)
    refusals_of_models.refuse_unrecorded(settings, asked, model)
    assert "--enable-return-routed-experts" in asked.command(model, "/tmp/s").argv
    written = {"rollout.environment": "demonstration", "trainer.algorithm": "sft"}
    for other in ({"trainer.context_parallel": 2}, {"trainer.compile": True}, written):
        assert "trainer.routing_replay with" in refusal(given | other)
    write_model(tmp_path / "model", {"eos_token_id": 0})
    assert refusal(given) == f"trainer.routing_replay: --model {model} has no experts; leave it out"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q_proj.weight", np.int8), ("q_proj.qweight", np.int32), ("experts.down_proj_blocks", np.uint8)],
)
def test_model_whose_tensors_alone_are_quantised_is_refused(tmp_path: Path, name: str, dtype: Any) -> None:
    model = write_model(tmp_path / "model", {"eos_token_id": 0})
    given = {"model": str(model), "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})}
    buffer = {"position_ids": np.zeros(2, np.int64), "k_proj.weight": np.zeros((2, 2), np.float64)}
    save_file(buffer, model / "model.safetensors")
    passes(given)
    save_file({**buffer, name: np.zeros((2, 2), dtype)}, model / "model.safetensors")
    assert f"its weights are quantised ({name} is " in refusal(given)


@pytest.mark.parametrize(
    ("model_type", "targets", "passing"),
    [("llama", "wte", "q_proj"), ("llama", "conv", "lm_head"), ("gpt2", "all-linear", "lm_head"),
     ("gpt2", "q_proj", "lm_head")],
)  # fmt: skip
def test_adapters_that_the_embedded_engine_cannot_serve_are_refused(
    tmp_path: Path, model_type: str, targets: str, passing: str
) -> None:
    model = write_model(tmp_path / "model", {"model_type": model_type, "eos_token_id": 0})
    tensors: dict[str, Any] = {
        f"model.{name}.weight": np.zeros((2, 2), np.float32) for name in ("wte", "q_proj", "lm_head")
    }
    tensors["model.conv.weight"] = np.zeros((2, 1, 2), np.float32)
    save_file(tensors, model / "model.safetensors")
    given = {
        "model": str(model),
        "tasks": tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"}),
        "trainer.lora.rank": 2,
        "engine.kind": "torch",
    }
    assert "serves adapters of linear layers only" in refusal({**given, "trainer.lora.targets": targets})
    passes({**given, "trainer.lora.targets": passing})


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'},
        {"tokenizer.json": "{}"},
    ],
    ids=["none", "code", "damaged"],
)
def test_model_without_a_tokenizer_that_can_be_loaded_is_refused(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    model = write_model(tmp_path / "model", {"model_type": "llama", "eos_token_id": 0})
    (model / "tokenizer.json").unlink()
    for name, text in tokenizer.items():
        (model / name).write_text(text)
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    settings = loading.build({"model": str(model), "tasks": tasks})
    loaded = load_tasks(tasks, seed=0, split="train")
    with pytest.raises(
        SettingsError, match=r"transformers cannot load its tokenizer \(\w+: .*; give it a"
    ) as refused:
        texts_of_tasks.look_at_text(settings, model, RunTasks(loaded), Embedded(settings.engine, 0))
    assert "\n" not in str(refused.value)
    texts_of_tasks.look_at_text(
        settings, model, RunTasks(loaded), Vllm(settings.engine, 0)
    )  # which may know another one


@pytest.mark.parametrize(("environment", "code", "is_said"), [
    ("my_env:play", "policy.with_tools(TOOLS)", True),
    ("my_env:play", "client.chat.completions.create(messages=messages, tools=[SEARCH])", True),
    ("my_env:play", "import itertools\n# needs no tools\npolicy.generate(task)", False),
    ("verifiers:mine", "", True),
])  # fmt: skip
def test_environment_that_may_give_tools_to_a_model_that_cannot_have_them_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, environment: str, code: str, is_said: bool
) -> None:
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    given = {"model": str(model_of(tmp_path / "model")), "tasks": tasks, "rollout.environment": environment}
    settings, loaded = loading.build(given), load_tasks(tasks, seed=0, split="train")
    engine = Embedded(settings.engine, 0)
    texts_of_tasks.look_at_text(settings, Path(settings.model), RunTasks(loaded), engine, [code])
    assert (f"--environment {environment}: a group with tools will be given up: " in caplog.text) == is_said


def test_model_that_cannot_have_the_tool_of_the_environment_python_is_refused(tmp_path: Path) -> None:
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "1", "answer": "1"})
    given = {"model": str(model_of(tmp_path / "model")), "tasks": tasks, "rollout.environment": "python"}
    settings, loaded = loading.build(given), load_tasks(tasks, seed=0, split="train")
    with pytest.raises(SettingsError, match="--environment python: the model's chat template"):
        texts_of_tasks.look_at_text(
            settings, Path(settings.model), RunTasks(loaded), Embedded(settings.engine, 0)
        )


def looked_at(tmp_path: Path, served: Served, given: dict[str, Any], letters: int) -> str:
    """The line with which a task is refused, for a model with a context of 200 tokens."""
    tasks = tasks_at(tmp_path / "t.jsonl", {"prompt": "x" * letters, "answer": "1"})
    url = {key: f"{served.url}/v1" for key in ["rollout.teacher"] if "trainer.algorithm" in given}
    settings = loading.build({"model": str(model_of(tmp_path / "model")), "tasks": tasks, **url, **given})
    loaded = load_tasks(tasks, seed=0, split="train")
    with pytest.raises(SettingsError) as refused:
        texts_of_tasks.look_at_text(
            settings, Path(settings.model), RunTasks(loaded), Embedded(settings.engine, 0)
        )
    assert "\n" not in str(refused.value)
    return str(refused.value)


TAUGHT = {"trainer.algorithm": "distill", "rollout.max_tokens": 8}


@pytest.mark.parametrize(
    ("given", "context", "status", "reason"),
    [
        (
            TAUGHT,
            41,
            200,
            r"t\.jsonl:1: task '1': its samples have 41 tokens or more, and .*/v1 has room for 40",
        ),
        (TAUGHT, 9, 200, r"rollout.max_tokens=8 leaves no room for a prompt: rollout.teacher=.* reads 8"),
        (TAUGHT, 99, 400, "rollout.teacher=.*: answered 400 to a sample with 260, the largest of"),
        ({}, 99, 200, "its samples have 201 tokens or more, and --model .* for 200"),
    ],
)
def test_what_teacher_or_model_cannot_read_is_refused(
    tmp_path: Path, served: Served, given: dict[str, Any], context: int, status: int, reason: str
) -> None:
    served.models = {"data": [{"id": "t", "max_model_len": context}]}
    served.answers = [status if status >= 400 else {}]
    assert re.search(reason, looked_at(tmp_path, served, given, 40 if "trainer.algorithm" in given else 200))


@pytest.mark.parametrize("split", [None, "eval-only"])
def test_task_without_a_hint_for_the_policy_as_its_own_teacher_is_refused(
    tmp_path: Path, split: str | None
) -> None:
    tasks = tasks_at(
        tmp_path / "t.jsonl", {"prompt": "1", "answer": "1", "why": 0}, {"prompt": "2", "answer": "2"}
    )
    given: dict[str, Any] = {"tasks": tasks, "rollout.teacher": "self:why", "rollout_split": split}
    if split == "eval-only":
        passes({**given, "eval_tasks": tasks, "rl_phase": "rollout"})
        return
    assert refusal(given) == (
        f"{tasks}:2: task '2': has no `why` for rollout.teacher=self:why; add it, or name another field"
    )


def test_source_that_no_task_is_of_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    rows = [{"prompt": name, "answer": "1", "source": name} for name in ("math", "code", "math")]
    tasks = tasks_at(tmp_path / "t.jsonl", *rows)
    passes({"tasks": tasks, "trainer.sources.math.weight": 2})
    text = refusal({"tasks": tasks, "trainer.sources.maths.weight": 2})
    assert text.startswith(f"trainer.sources.maths: no task of --tasks {tasks} has that 'source'")
    assert text.endswith("there are: code (1 tasks), math (2 tasks)")
    passes({"tasks": tasks, "rollout.rewards.math": "exact"})
    text = refusal({"tasks": tasks, "rollout.rewards.maths": "exact"})
    assert text.startswith(f"rollout.rewards.maths: no task of --tasks {tasks} has that 'source'")
    text = refusal({"tasks": tasks, "rollout.rewards.math": "numeric", "rollout.reward": "length"})
    assert text.startswith(f"{tasks}:2: --reward length cannot score this task")
    own = {"rollout.teachers.math": "http://127.0.0.1:1/v1", "rollout.teacher": "self:source"}
    passes({"tasks": tasks, **own})
    text = refusal({"tasks": tasks, **own, "rollout.teacher": "self:why"})
    assert text.startswith(f"{tasks}:2: task '2': has no `why`"), "the first one has another teacher"
    teachers = {"rollout.teacher": "http://127.0.0.1:1/v1", "rollout.teachers.maths": "http://127.0.0.1:1/v1"}
    assert refusal({"tasks": tasks, **teachers}).startswith("rollout.teachers.maths: no task of --tasks")


def test_prompt_that_the_hint_makes_too_long_is_refused(tmp_path: Path) -> None:
    tasks = tasks_at(
        tmp_path / "t.jsonl", {"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "1" * 190}
    )
    given = {"model": str(model_of(tmp_path / "model")), "tasks": tasks, "rollout.max_tokens": 8}
    settings = loading.build({**given, "trainer.algorithm": "distill", "rollout.teacher": "self:answer"})
    loaded = load_tasks(tasks, seed=0, split="train")
    text = r"219 tokens or more, and rollout.teacher=self:answer \(with the hint\) has room for 200"
    with pytest.raises(SettingsError, match=text):
        texts_of_tasks.look_at_text(
            settings, Path(settings.model), RunTasks(loaded), Embedded(settings.engine, 0)
        )


# ---- pictures


LLAVA = {"model_type": "llava", "image_token_index": 3, "vision_config": {}}


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        (
            {"model_type": "qwen3"},
            {},
            "--model MODEL, which has no part for pictures, does not go with it yet; give a model",
        ),
        (
            LLAVA,
            {},
            "--model MODEL without a preprocessor_config.json does not go with it yet; put the files",
        ),
        (LLAVA, {"rollout.segment_tokens": 8}, "rollout.segment_tokens=8 .*; leave it out"),
        (
            LLAVA,
            {"trainer.tensor_parallel_size": 2, "trainer.processes_per_node": 2},
            "tensor_parallel_size=2 ",
        ),
        (LLAVA, {"trainer.context_parallel": 2, "trainer.processes_per_node": 2}, "context_parallel=2 "),
    ],
)
def test_what_takes_no_pictures_yet_is_refused(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}
    tasks = tasks_at(tmp_path / "t.jsonl", CHAT, {"messages": [shown], "answer": "3"})
    model = str(write_model(tmp_path / "model", config))
    if given or config != LLAVA:
        (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    text = refusal({"engine.kind": "torch", "model": model, "tasks": tasks, **given})
    assert text.startswith(f"{tasks}:2: this task shows a picture, and ")
    assert re.search(reason.replace("MODEL", model), text)
    assert "--model builtin:tiny, which has no part for pictures" in refusal({"tasks": tasks})


def test_model_that_sees_may_have_tasks_without_pictures(tmp_path: Path) -> None:
    model, settings = write_model(tmp_path / "model", LLAVA), loading.build({"model": "here"})
    tasks = load_tasks("builtin:arithmetic", seed=0, split="train")
    refusals_of_tasks.refuse_pictures(settings, Vllm(EngineSettings(), 0), model, RunTasks(tasks))


def test_adapters_in_what_looks_at_pictures_are_not_for_vllm_where_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Vllm, "check_pictures", lambda engine, most: None)
    given = {"model": TINY, "trainer.lora.rank": 4, "tasks": SHAPES}
    written = {"rollout.environment": "demonstration", "trainer.algorithm": "sft", "eval.interval": 0}
    tasks = load_tasks(SHAPES, seed=0, split="train")
    moving = {"trainer.freeze_vision": False}
    for more, is_refused in ((moving, True), ({}, False), ({**moving, **written}, False)):
        settings = loading.build({**given, **more})
        with pytest.raises(SettingsError, match=r"lora\.rank=4 with") if is_refused else nullcontext():
            refusals_of_tasks.refuse_pictures(settings, Vllm(EngineSettings(), 0), None, RunTasks(tasks))


def test_start_warns_of_a_judge_that_would_score_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.models = {"data": [{"id": "big", "max_model_len": 8}]}
    judges = [f"judge:{served.url}/v1,model={name}" for name in ("big", "bug")]
    given = {"rollout.reward": f"exact=1 + {judges[0]}=1", "eval.sets.a.reward": judges[1]}
    refusals_of_models.warn_of_reward_servers(
        loading.build({**given, "eval.sets.a.tasks": "builtin:products"})
    )
    warned = [record.getMessage() for record in caplog.records if record.name == refusals_of_models.__name__]
    assert [line.partition(": as it is")[0] for line in warned] == [
        f"--reward {judges[0]}: the judge reads 8 tokens, and a sample alone may have rollout.max_tokens=8",
        f"eval.sets.a.reward={judges[1]}: there is no model 'bug', but big",
    ]
    caplog.clear()
    of_source = {"rollout.rewards.math": f"numeric=1 + {judges[1]}=0.5", "rollout.reward": "exact=1"}
    refusals_of_models.warn_of_reward_servers(
        loading.build({**of_source, "eval.sets.a.tasks": "builtin:products"})
    )
    warned = [record.getMessage() for record in caplog.records if record.name == refusals_of_models.__name__]
    assert [line.partition(": ")[0].partition("=")[0] for line in warned] == [
        "rollout.rewards.math",
        "eval.sets.a.reward",
    ], "a set without a reward of its own has those of all sources"


def test_run_that_begins_among_files_of_others_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "doctor").mkdir()
    check_new_run(tmp_path, RunSettings())
    check_new_run(tmp_path / "new", RunSettings())
    assert not caplog.messages
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).touch()
    check_new_run(tmp_path, RunSettings())
    assert caplog.messages == [
        f"--log-path {tmp_path} holds no run, but a, b, c, ...; the run's files go beside them"
    ]
    check_new_run(
        tmp_path, RunSettings(rl_phase="rollout", rollout_split="eval-only")
    )  # run eval puts the model there
    assert len(caplog.messages) == 1


def test_run_on_a_disk_of_the_master_alone_asks_whether_the_others_see_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = {"ext4": Mount("ext4", "/dev/sda1", "/"), "nfs4": Mount("nfs4", "server:/x", "/shared")}
    for kind, mount in mounts.items():
        monkeypatch.setattr("coordinator.start.log_path.find_mount", lambda _, mount=mount: mount)
        warn_of_own_disk(tmp_path, 2)
        assert len(caplog.messages) == 1, kind
    assert "is on a disk of this machine (ext4 at /); do the other nodes see it?" in caplog.messages[0]
    monkeypatch.setattr("coordinator.start.log_path.find_mount", lambda _: mounts["ext4"])
    warn_of_own_disk(tmp_path, 1)
    monkeypatch.setenv("FLAGPOST_STARTED_BY", "run local")
    warn_of_own_disk(tmp_path, 2)
    assert len(caplog.messages) == 1
