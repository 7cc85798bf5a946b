"""Reasoning Gym: the same tasks on every node, disjoint splits, and the data set's own scores."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.processes.pool import ProcessPool
from rollout.rewards.resolve import resolve_reward
from rollout.rewards.reward import RewardError, score
from rollout.tasks import reasoning_gym
from rollout.tasks.task_set import Task, TaskError, is_file, load_tasks
from tests.rollout.rewards.scoring import make_sample

LEGS = "reasoning_gym:leg_counting,size=60"


@pytest.fixture(scope="module", autouse=True)
def one_generator() -> Iterator[None]:
    """One process generates for all tests: each imports the library for 2 s. Which process it is does not
    matter (test_tasks_are_the_same_on_every_node).
    """
    pool = ProcessPool("rollout.tasks.reasoning_gym:make_generator", size=1)
    lasting = SimpleNamespace(call=pool.call, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym, "ProcessPool", lambda *_args, **_more: lasting)
        yield
    pool.close()


def load(source: str, split: Any = "train", seed: int = 0) -> Sequence[Task]:
    return load_tasks(source, seed=seed, split=split).tasks


def scores(task: Task, *completions: str) -> list[Any]:
    reward = resolve_reward("reasoning_gym")

    async def main() -> list[Any]:
        samples = [make_sample(completion) for completion in completions]
        for error in await score(reward, task, samples):
            raise error
        return [sample.reward for sample in samples]

    return asyncio.run(main())


def test_task_holds_question_answer_and_what_the_scorer_needs() -> None:
    task = load(LEGS + ",max_animals=4")[0]
    assert "how many legs" in task["prompt"] and task["answer"].isdecimal()
    assert task["source"] == "leg_counting" and task["id"].startswith("leg_counting/")
    index = task["reasoning_gym"].pop("index")
    config = {"seed": 0, "size": 60, "max_animals": 4}
    assert task["reasoning_gym"] == {"dataset": "leg_counting", "config": config}
    assert task["id"] == f"leg_counting/{index}"
    assert json.loads(json.dumps(task)) == task


def test_splits_are_disjoint_whatever_their_parameters() -> None:
    """Of so few questions the same ones come with every seed."""
    source = "reasoning_gym:gcd,min_value=1,max_value=15,size="
    train, evaluation = load(source + "300"), load(source + "500,seed=9", "eval")
    questions = [task["prompt"] for task in train]
    assert len(set(questions)) == len(questions) < 200 and evaluation
    assert not set(questions) & {task["prompt"] for task in evaluation}


def test_one_question_in_ten_is_held_out() -> None:
    train, evaluation = (load("reasoning_gym:leg_counting,size=1000", split) for split in ("train", "eval"))
    assert len(train) + len(evaluation) == 1000 and 70 < len(evaluation) < 130


def test_seed_is_the_runs_unless_it_is_given() -> None:
    first, other, given = load(LEGS, seed=0), load(LEGS, seed=1), load(LEGS + ",seed=1", seed=7)
    assert first != other == given


# word_ladder and polynomial_multiplication draw from sets, codeio from the global random state.
HARD_TO_REPEAT = "reasoning_gym:word_ladder,size=5+polynomial_multiplication,size=5+codeio,size=5"


def test_tasks_are_the_same_on_every_node() -> None:
    script = (
        "import random; random.seed(); from rollout.tasks.task_set import load_tasks; "
        f"print(load_tasks({HARD_TO_REPEAT!r}, seed=0, split='train').digest)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert other.stdout.strip() == load_tasks(HARD_TO_REPEAT, seed=0, split="train").digest


def test_every_answer_is_right_by_its_own_scorer_in_another_process() -> None:
    for task in load(HARD_TO_REPEAT + "+arc_agi,size=4+rearc,size=4+time_intervals,size=3"):
        right, wrong = scores(task, f"Well. <answer>{task['answer']}</answer>", "<answer>?</answer>")
        assert right == 1.0 and wrong < 1.0, task


def test_several_data_sets_are_classes_by_source() -> None:
    tasks = load("reasoning_gym:leg_counting,size=20+chain_sum,size=20,max_terms=2")
    assert {task["source"] for task in tasks} == {"leg_counting", "chain_sum"}
    assert len({task["id"] for task in tasks}) == len(tasks)


def test_list_parameters_and_text_parameters_are_taken() -> None:
    tasks = load('reasoning_gym:basic_arithmetic,size=30,operators=["+","-"],whitespace=no_space')
    assert all("*" not in task["prompt"] and " + " not in task["prompt"] for task in tasks)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("{}", 1.0),
        (" {}\n", 1.0),
        ("I count. <answer>{}</answer>", 1.0),
        ("<answer>0</answer> no: <answer> {} </answer>", 1.0),
        ("<answer>{}</answer> no: <answer>0</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_answer_is_the_last_tag_or_without_any_all_of_it(completion: str, expected: float) -> None:
    task = load(LEGS)[0]
    assert scores(task, completion.format(task["answer"])) == [expected]


def test_system_prompt_makes_messages_and_asks_for_tags() -> None:
    task = load(LEGS + ",system=direct")[0]
    system, user = task["messages"]
    assert system["role"] == "system" and "<answer>" in system["content"] and "prompt" not in task
    assert user == {"role": "user", "content": load(LEGS)[0]["prompt"]}
    assert scores(task, task["answer"], f"<answer>{task['answer']}</answer>") == [0.0, 1.0]


def test_answer_that_a_scorer_cannot_read_earns_nothing() -> None:
    task = load("reasoning_gym:prime_factorization,size=5")[0]
    assert scores(task, "I do not know", "<answer>x</answer>") == [0.0, 0.0]


def test_scorer_without_a_single_answer_scores_what_it_is_given() -> None:
    tasks = load("reasoning_gym:graph_color,size=4,num_colors=3")
    assert all("answer" not in task for task in tasks)
    assert scores(tasks[0], "no coloring") == [0.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("leg_cunting", "no data set 'leg_cunting'; did you mean leg_counting or letter_counting"),
        ("leg_counting,sizee=3", "leg_counting has no parameter 'sizee'; there is min_animals, max_animals"),
        ("leg_counting,min_animals=9,max_animals=2", "max_animals must be >= min_animals"),
        ("leg_counting,system=foo", "system=foo: there is DeepSeekZero, default"),
        ("leg_counting+leg_counting", "leg_counting is named twice"),
        ("leg counting", "'leg counting' is not of the form NAME,PARAMETER=VALUE"),
        ("leg_counting,size=1", "gives no eval task out of 1 questions; raise size"),
    ],
)
def test_source_that_cannot_be_used_is_an_error_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(TaskError) as raised:
        load("reasoning_gym:" + text, "eval")
    message = str(raised.value)
    assert message.startswith(f"reasoning_gym:{text}: ") and reason in message and "\n" not in message


def test_a_task_of_another_version_of_the_library_is_an_error() -> None:
    task = {**load(LEGS)[0], "prompt": "How many?"}
    with pytest.raises(RewardError, match="is another one with this version of reasoning_gym"):
        scores(task, "4")
    with pytest.raises(ValueError, match="it is not a task of Reasoning Gym; give --tasks"):
        scores({"id": "1", "prompt": "1+2="}, "3")


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reasoning_gym._LIBRARY, "library", "no_such_reasoning_gym")
    reasoning_gym._generated.cache_clear()
    with pytest.raises(TaskError, match=r"is not installed; .* pip install -e '\.\[gym\]'"):
        load(LEGS)
    reasoning_gym._generated.cache_clear()


def test_generated_sources_are_no_files() -> None:
    assert not is_file(LEGS) and not is_file("builtin:arithmetic") and is_file("./tasks.jsonl")
