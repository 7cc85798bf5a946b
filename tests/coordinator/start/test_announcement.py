"""What a start says it starts: its facts, and that it fits a terminal."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.machine import gpus as gpus_module
from coordinator.settings.loading import build
from coordinator.start import announcement as announcement_module
from coordinator.start import inputs
from coordinator.start.announcement import announcement
from coordinator.start.request import StartRequest
from coordinator.start.start import start_master
from rollout.engines.kinds import vllm_installed
from rollout.engines.kinds.choice import engine_kind
from tests.models import write_model
from tests.rollout.environments.openenv_server import Action, Observation, Server

PREFIX = len("[rank 0] ")


def said(tmp_path: Path, given: dict[str, Any], first: int = 1) -> dict[str, str]:
    start = start_master(StartRequest(tmp_path / "run", overrides=given))
    lines = announcement(start, first)
    return {line[:10].strip(): line[10:] for line in lines}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, with a name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(announcement_module.socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(announcement_module, "cores", lambda: 8)


def test_demo_says_what_it_starts(tmp_path: Path) -> None:
    lines = said(tmp_path, {"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1"})
    assert lines == {
        "model": "builtin:tiny, 0.341 M parameters",
        "engine": "torch, the embedded engine (no GPU on this machine)",
        "algorithm": "default, learning rate 0.0003, 256 sequences per step",
        "tasks": "7588 (builtin:arithmetic); 512 to evaluate every 5 iterations",
        "samples": "128 x 8 per iteration, up to 8 tokens; iterations 1 to 16",
        "reward": "exact, environment single_turn",
        "nodes": "3, weights 2,1,1; this one, node-a: 8 cores, no GPU",
        "writes to": str(tmp_path / "run"),
        "look": f"run status --watch --log-path {tmp_path / 'run'}",
        "": "(run logs and run report take the same --log-path)",
    }
    free = {"writes to", "look"}  # a path is as long as it is
    assert all(PREFIX + 10 + len(text) <= 80 for title, text in lines.items() if title not in free)


def test_demonstrations_have_no_reward_to_announce(tmp_path: Path) -> None:
    given = {"trainer.algorithm": "sft", "tasks": "builtin:arithmetic"}
    assert said(tmp_path, given)["reward"] == "exact, in evaluations"
    assert "reward" not in said(tmp_path, {**given, "eval.interval": 0})


def test_built_in_model_is_said_to_be_of_no_use_for_other_tasks(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    model = said(tmp_path, {"tasks": f"{tmp_path}/own.jsonl"})["model"]
    assert model == "builtin:tiny, 0.341 M parameters; it can only add numbers, so give --model"


def test_same_devices_for_both_halves_are_one_crew(tmp_path: Path) -> None:
    lines = said(tmp_path, {"cluster.place": ["rollout=0", "train=0"]})
    assert lines["crews"] == "rollout=0 train=0, one crew, in turns"


def test_environment_from_elsewhere_gives_the_reward(tmp_path: Path) -> None:
    class Text(Action):
        text: str

    class Seen(Observation):
        text: str

    with Server(lambda: SimpleNamespace(reset=lambda seed: Seen(text=str(seed))), Text, Seen) as server:
        name = f"openenv:{server.url}"
        lines = said(tmp_path, {"tasks": f"{name},size=20", "rollout.environment": name})
    assert lines["reward"] == f"of the environment {name}"
    assert lines["tasks"].startswith(f"18 ({name},size=20); 2 to evaluate")


def test_evaluation_of_named_sets_says_their_reward_and_nothing_of_training_tasks(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    sets = {"eval.sets.sums.tasks": str(tmp_path / "other.jsonl"), "eval.sets.sums.reward": "numeric"}
    lines = said(tmp_path, {"rl_phase": "rollout", "rollout_split": "eval-only", "tasks": str(tasks), **sets})
    assert lines["reward"] == "numeric, environment single_turn" and not {"data", "algorithm"} & lines.keys()


def test_start_without_settings_says_that_it_is_the_demo(tmp_path: Path) -> None:
    text = said(tmp_path, {})["demo"]
    assert "the built-in model learns to add" in text and PREFIX + 10 + len(text) <= 80


def test_model_directory_says_its_size_and_its_own_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    shapes: Any = {"a.safetensors": [(1000, 1000), (200, 1000)], "b.safetensors": [(100, 1000)]}
    model = write_model(tmp_path / "model", {"max_position_embeddings": 2048}, {}, shapes)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    given = {
        "model": str(model), "tasks": str(tmp_path / "tasks.jsonl"), "engine.kind": "torch",
        "trainer.algorithm": "grpo", "trainer.lora.rank": 8,
    }  # fmt: skip
    lines = said(tmp_path, given, first=7)
    assert lines["model"] == f"{model}, 1.3 M parameters"
    assert lines["engine"] == "torch, the embedded engine (--engine torch)"
    assert lines["algorithm"] == "grpo, learning rate 1e-06, 512 sequences per step, adapters of rank 8"
    assert lines["tasks"] == f"1 ({tmp_path / 'tasks.jsonl'}); no evaluation"
    assert lines["data"] == "an iteration takes each task 128 times"
    assert lines["samples"] == ("128 x 8 per iteration, up to 2047 tokens; from iteration 7 on")
    assert lines["nodes"] == "1; this one, node-a: 2 GPUs"


def test_start_says_how_many_iterations_an_epoch_of_the_data_is(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 30)
    given = {"tasks": str(tmp_path / "tasks.jsonl"), "rollout.tasks_per_iteration": 8}
    lines = said(tmp_path, given)
    assert lines["data"] == "3.75 iterations take each task once; then they repeat in another order"
    assert "data" not in said(tmp_path, {**given, "rollout.dynamic_sampling": True})
    lines = said(tmp_path, {**given, "rollout.tasks_per_iteration": 30})
    assert lines["data"] == "an iteration takes each task once; then they repeat in another order"


@pytest.mark.parametrize(("size", "gpus"), [(1_000_000, "2 GPUs"), (300_000, "1 GPU")])
def test_node_of_several_gpus_says_how_many_a_replica_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, gpus: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: True)
    small = [{"name": "small", "memory_bytes": 2_000_000}, {"name": "large", "memory_bytes": 9_000_000}]
    for module in (announcement_module, gpus_module):
        monkeypatch.setattr(module, "list_gpus", lambda: (small, ""))
    shapes: Any = {"model.safetensors": [(size // 1000, 1000)]}
    model = write_model(tmp_path / "model", {"max_position_embeddings": 2048}, {}, shapes)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    given = {"model": str(model), "tasks": str(tmp_path / "tasks.jsonl"), "engine.kind": "vllm"}
    assert said(tmp_path, given)["engine"] == f"vLLM (--engine vllm), a replica on {gpus}, bfloat16"


def test_vllm_on_a_cpu_says_its_number_type_and_what_another_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_installed, "is_installed", lambda _module: True)
    model = write_model(tmp_path / "model", {"max_position_embeddings": 2048}, {}, {})
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    given = {"model": str(model), "tasks": str(tmp_path / "tasks.jsonl"), "engine.kind": "vllm"}
    assert said(tmp_path, given)["engine"] == "vLLM (--engine vllm), float32"
    (tmp_path / "half").mkdir()
    half = {"engine.args.dtype": "bfloat16", "trainer.compute_dtype": "bfloat16"}
    assert "bfloat16 (so its logprobs differ a little" in said(tmp_path / "half", {**given, **half})["engine"]


def test_machine_without_a_gpu_says_what_an_iteration_takes_of_time_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement_module, "measured_flops", lambda: 1e9)
    shapes: Any = {"model.safetensors": [(1000, 1000)]}
    model = write_model(tmp_path / "model", {"max_position_embeddings": 2048}, {}, shapes)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    given = {"model": str(model), "tasks": str(tmp_path / "tasks.jsonl")}
    lines = said(tmp_path, given)
    assert lines["time"] == (
        "an iteration generates for 9 h (5 h with engine.dtype=float32) and trains for 12 h if samples have "
        "2047 tokens; lower rollout.tasks_per_iteration, rollout.samples_per_task or rollout.max_tokens"
    )
    assert lines["disk"].startswith("an iteration writes 0.004 GB of weights")
    (tmp_path / "other").mkdir()
    assert "time" not in said(tmp_path / "other", {**given, "rl_phase": "rollout"})


@pytest.mark.parametrize(
    ("given", "title", "text"),
    [
        ({"rl_phase": "rollout"}, "algorithm", "none (--rl-phase rollout)"),
        ({"rl_phase": "update"}, "engine", "none (--rl-phase update)"),
        (
            {"rl_phase": "rollout", "rollout_split": "train-only"},
            "tasks",
            "7588 (builtin:arithmetic); no evaluation",
        ),
        ({"eval.interval": 0}, "tasks", "7588 (builtin:arithmetic); no evaluation"),
        ({"iterations": 1}, "samples", "128 x 8 per iteration, up to 8 tokens; iteration 1"),
        ({"rl_phase": "rollout", "rollout_split": "eval-only"}, "tasks", "512 to evaluate"),
        ({"rl_phase": "rollout", "rollout_split": "eval-only"}, "samples", None),
        ({"eval.interval": 1}, "tasks", "7588 (builtin:arithmetic); 512 to evaluate every iteration"),
    ],
)
def test_part_that_does_not_run_is_said_so(
    tmp_path: Path, given: dict[str, Any], title: str, text: str | None
) -> None:
    if given.get("rl_phase") == "update":  # of a run that has samples
        start_master(StartRequest(tmp_path / "run", overrides={}))
    assert said(tmp_path, given).get(title) == text


def test_facts_of_the_built_in_model_are_those_of_the_model_that_is_made() -> None:
    from trainer.model.tiny import make_model

    model = make_model(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == inputs.TINY_PARAMETERS
    assert model.config.max_position_embeddings == inputs.TINY_CONTEXT


def test_arguments_of_vllm_are_said_to_do_nothing_where_there_is_no_gpu() -> None:
    settings = build({"engine.args.max-model-len": 512}).engine
    assert "no GPU on this machine, so engine.args do nothing here" in engine_kind(settings, 0).name
    assert "do nothing" not in engine_kind(build({}).engine, 0).name
