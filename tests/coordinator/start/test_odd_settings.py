"""Settings that do nothing, or something else than they seem to, are said at the start."""

from typing import Any

import pytest

from coordinator.settings.loading import build, known_keys
from coordinator.start.odd_settings import WORKS_WITH, odd_settings


def warnings(has_end: bool = True, **typed: Any) -> list[str]:
    given = {name.replace("__", "."): value for name, value in typed.items()}
    settings = build(given)
    return list(odd_settings(settings, given, has_end))


def test_settings_and_what_they_work_with_are_settings() -> None:
    assert {*WORKS_WITH, *(other for other, _ in WORKS_WITH.values())} <= set(known_keys())
    for key, (other, values) in WORKS_WITH.items():
        build({other: values[0]})
        assert key != other


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (
            {"rollout__ratio__easy": 2},
            "rollout.ratio.easy=2 does nothing with rollout.task_sampling=uniform; give rollout.task_s",
        ),
        (
            {"trainer__kl_coefficient": 0.1},
            "trainer.kl_coefficient=0.1 does nothing with trainer.kl=off; give trainer.kl=k3 as well",
        ),
        (
            {"trainer__lora__alpha": 16, "trainer__lora__rank": 0},
            "trainer.lora.alpha=16 does nothing without adapters; give trainer.lora.rank=16 as well",
        ),
        (
            {"trainer__algorithm": "sft", "rollout__samples_per_task": 8, "tasks": "demonstrations.jsonl"},
            "rollout.samples_per_task=8 does nothing with rollout.environment=demonstration: a task has its",
        ),
        (
            {"engine__kind": "torch", "engine__args__max-model-len": 64},
            "engine.args.max-model-len does nothing with --engine torch; it is for vLLM",
        ),
        (
            {"engine__kind": "torch", "engine__tensor_parallel_size": 2},
            "engine.tensor_parallel_size does nothing with --engine torch; it is for vLLM",
        ),
        (
            {"engine__kind": "vllm", "engine__dtype": "float32"},
            "engine.dtype does nothing with --engine vllm; it is for the embedded engine",
        ),
        (
            {"engine__url": "http://127.0.0.1:8000", "engine__args__max-model-len": 64},
            "engine.args.max-model-len does nothing with --engine-url http://127.0.0.1:8000; set it there",
        ),
        (
            {"trainer__sources__math__kl_coefficient": 0.1},
            "trainer.sources.math.kl_coefficient=0.1 does nothing with trainer.sources.math.kl=off; "
            "give trainer.sources.math.kl=k3 as well",
        ),
        (
            {"trainer__algorithm": "sft", "tasks": "d.jsonl", "rollout__rewards__math": "math"},
            "rollout.rewards.math does nothing with rollout.environment=demonstration: it has its own",
        ),
        (
            {"trainer__kl": "k3", "trainer__kl_coefficient": 0.0},
            "trainer.kl=k3 with trainer.kl_coefficient=0: KL is measured (kl_reference), and holds nothing",
        ),
        (
            {"trainer__lora__rank": 8, "model": "some/model", "tasks": "t.jsonl"},
            "trainer.learning_rate=1e-06 is for whole models; adapters learn with about 1e-05",
        ),
        ({"rollout__environment": "gym:a:B", "rollout__reward": "math"}, "rollout.reward does nothing with"),
        ({"trainer__dual_clip": 2.0}, "trainer.dual_clip=2.0 does nothing with trainer.clip="),
        (
            {"trainer__algorithm": "sapo", "trainer__clip_low": 0.1},
            "trainer.clip_low=0.1 does nothing with trainer.clip=soft; give trainer.clip=ppo as well",
        ),
        (
            {"rollout__dynamic_limit": 2},
            "rollout.dynamic_limit=2 does nothing with rollout.dynamic_sampling=false; "
            "give rollout.dynamic_sampling=true as well",
        ),
        (
            {"iterations": 2, "trainer__warmup_steps": 10, "trainer__learning_rate": 3e-5,
             "rollout__tasks_per_iteration": 4, "trainer__global_batch_size": 16},
            "2 iterations are 4 optimizer steps, so the learning rate ends at 1.2e-05 and",
        ),
        ({"trainer__learning_rate": 1e6}, "trainer.learning_rate=1e+06 spoils any model; most"),
        ({"trainer__clip_high": 28}, "trainer.clip_high=28 with trainer.clip=ppo clips next to nothing"),
        ({"trainer__algorithm": "gmpo", "trainer__clip_low": 40}, "trainer.clip_low=40 with trainer.clip=g"),
        ({"engine__args__gpu-memory-utilization": 80}, "engine.args.gpu-memory-utilization=80: it is a part"),
        ({"eval__samples_per_task": 4}, "eval.temperature=0: all 4 samples of a task are the same"),
        ({"eval__samples_per_task": 4, "eval__temperature": 1e-6}, "eval.temperature=1e-06: all 4 samples"),
        ({"eval__samples_per_task": 4, "eval__temperature": 1, "eval__top_k": 1}, "eval.top_k=1: all 4"),
        ({"rollout__temperature": 1e-6}, "1e-06: all 8 samples of a task are the same, so nothing"),
        ({"rollout__top_p": 0.9}, "trainer's, so the correction weighs tokens less; leave it out"),
        ({"rollout__top_p": 0.9, "trainer__engine_correction": "off"}, "so steps are biased; leave it out"),
        ({"rollout__top_k": 20}, "rollout.top_k=20: the engine's logprobs differ"),
        ({"rollout__min_p": 0.05}, "rollout.min_p=0.05: the engine's logprobs differ"),
    ],
)  # fmt: skip
def test_odd_setting_is_named_with_what_to_do(typed: dict[str, Any], text: str) -> None:
    assert any(text in line for line in warnings(**typed))


def test_settings_that_work_are_not_mentioned() -> None:
    assert not warnings(trainer__kl="k1", trainer__kl_coefficient=0.1, iterations=100)
    assert not warnings(trainer__algorithm="grpo", trainer__kl_coefficient=0.1), "the preset sets kl"
    assert not warnings(trainer__algorithm="gmpo", trainer__clip_low=0.3, iterations=100)
    assert not warnings(trainer__lora__alpha=16, trainer__lora__rank=8)
    assert not warnings(engine__kind="vllm", engine__tensor_parallel_size=2)
    assert not warnings(engine__kind="torch", engine__dtype="float32")
    assert not warnings(trainer__algorithm="sft", tasks="demonstrations.jsonl")
    assert not warnings(eval__top_k=20, eval__min_p=0.05, eval__top_p=0.9, iterations=100)
    assert not warnings(trainer__sources__math__algorithm="grpo", trainer__sources__math__kl_coefficient=0.1)
    scored: dict[str, Any] = {
        "tasks": "demonstrations.jsonl",
        "eval_tasks": "e.jsonl",
        "rollout__reward": "math",
    }
    assert not warnings(trainer__algorithm="sft", **scored), "the evaluation asks it"
    assert not warnings(iterations=1), "nobody has asked for a learning rate"
    assert not warnings(iterations=1, rl_phase="rollout", rollout_split="train-only")


def test_model_without_an_end_is_named() -> None:
    (line,) = warnings(has_end=False)
    assert "every sample goes on to rollout.max_tokens" in line and "rollout.stop" in line
