"""trainer.algorithm=sft: all that a user types beside --tasks."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.collector.making import recipe_of
from coordinator.collector.order import RecipeNames
from coordinator.settings.loading import build, overlay
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import load_inputs
from rollout.environments.demonstration import demonstration
from rollout.environments.environment import single_turn
from rollout.environments.preference import preference
from rollout.origin import Sampling
from tests.coordinator.examples import write_json

SFT = {"trainer.algorithm": "sft"}


def test_sft_trains_on_one_demonstration_a_task() -> None:
    settings = build(SFT)
    assert (settings.rollout.environment, settings.rollout.samples_per_task) == ("demonstration", 1)
    assert (settings.trainer.advantage, settings.trainer.clip) == ("one", "likelihood")
    assert RunSettings.published(settings.model_dump(mode="json")) == overlay(settings, SFT) == settings


def test_sft_takes_another_rollout_where_one_is_given() -> None:
    settings = build({**SFT, "rollout.environment": "calculator", "rollout.samples_per_task": 4})
    assert (settings.rollout.environment, settings.rollout.samples_per_task) == ("calculator", 4)


def test_group_of_one_is_refused_where_it_has_no_advantage() -> None:
    assert build({"trainer.algorithm": "rft", "rollout.samples_per_task": 1}).rollout.samples_per_task == 1
    with pytest.raises(SettingsError, match="a group of one has no advantage"):
        build({"rollout.samples_per_task": 1})


def test_demonstrations_are_refused_by_a_loss_that_needs_an_engine() -> None:
    with pytest.raises(SettingsError, match=r"algorithm=grpo needs .*clip=ppo.*add trainer\.algorithm=sft"):
        build({"trainer.algorithm": "grpo", "rollout.environment": "demonstration"})


def test_flat_groups_that_are_replaced_do_not_count_too() -> None:
    dynamic = {"trainer.algorithm": "dr_grpo", "rollout.dynamic_sampling": True}
    with pytest.raises(SettingsError, match=r"add trainer\.keep_flat_groups=false"):
        build(dynamic)
    build({**dynamic, "trainer.keep_flat_groups": False})
    build({**dynamic, "trainer.algorithm": "dapo"})


def test_task_without_an_answer_is_named_before_anything_is_written(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "b7", "prompt": "1+2="}) + "\n")
    sampled = {"tasks": str(tasks), "rollout.reward": "tests.simulation.engines:reward"}
    assert load_inputs(build(sampled), {}).functions.environment.name == "single_turn"
    with pytest.raises(SettingsError, match="task 'b7' has no answer to demonstrate"):
        load_inputs(build({**SFT, "tasks": str(tasks)}), {})


async def taught(task: Any, policy: Any, sampling: Any) -> Any:
    raise NotImplementedError


taught.demonstrates = True  # type: ignore[attr-defined]


def test_training_demonstrates_and_evaluation_generates(tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    positions = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    write_json(tmp_path / "config.json", {"rope_parameters": positions, "vocab_size": 10})
    added = {"added_tokens": [{"id": 9, "content": "<turn>", "special": True}]}
    write_json(tmp_path / "tokenizer.json", added)
    settings = SimpleNamespace(stop=("<turn>", "words"))

    def recipe(name: str, kind: str) -> Any:
        order: Any = SimpleNamespace(kind=kind, start_model=str(tmp_path), settings=settings)
        return recipe_of(order, RecipeNames("exact", name, Sampling()))

    def environment_of(name: str, kind: str) -> Any:
        return recipe(name, kind).environment

    for name, written in (("demonstration", demonstration), ("preference", preference)):
        train = environment_of(name, "train")
        assert isinstance(train, partial)
        limits = {"context": 64, "vocabulary": 10}
        assert (train.func, train.keywords) == (written, {"end_ids": (5, 6, 9), **limits})
        assert environment_of(name, "eval") is single_turn
    assert environment_of("single_turn", "train") is single_turn
    of_user = recipe(f"{__name__}:taught", "train")
    assert (of_user.environment.__name__, of_user.context, of_user.vocabulary) == ("taught", 64, 10)
