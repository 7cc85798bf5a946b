"""The environment `preference`: two samples of a task, and what a task file may look like."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.policy import Policy
from rollout.environments.preference import check_preferences, preference
from rollout.origin import Sampling
from rollout.tasks.task_set import TaskError, load_tasks
from tests.rollout.environments.test_demonstration import ASKED, CHAT, MESSAGES, parts_of

BETTER, WORSE = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "three"}


def answered(task: dict[str, Any], max_tokens: int = 50) -> list[tuple[str, str, float | None]]:
    """Prompt, trained text and reward of each sample."""
    sampling = Sampling(n=2, max_tokens=max_tokens)
    made = asyncio.run(preference({"id": "a", **task}, Policy(CHAT, sampling, 0), sampling, (ord("$"),)))
    return [(*parts_of(sample), sample.reward) for sample in made]


def loaded(tmp_path: Path, *tasks: dict[str, Any]) -> Any:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return load_tasks(str(path), seed=0, split="train")


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        ({"prompt": "1+2=", "chosen": "3", "rejected": "three"}, "^1+2="),
        ({"messages": MESSAGES, "chosen": "3", "rejected": "three"}, ASKED),
        ({"prompt": MESSAGES, "chosen": [BETTER], "rejected": [WORSE]}, ASKED),
        ({"chosen": [*MESSAGES, BETTER], "rejected": [*MESSAGES, WORSE]}, ASKED),
        ({"messages": MESSAGES, "chosen": [*MESSAGES, BETTER], "rejected": [*MESSAGES, WORSE]}, ASKED),
    ],
    ids=["texts", "texts and messages", "prompt of messages", "conversations", "conversations and messages"],
)
def test_both_answers_are_trained_with_their_rewards(
    tmp_path: Path, task: dict[str, Any], prompt: str
) -> None:
    tasks = loaded(tmp_path, task)
    check_preferences(tasks)
    assert answered(tasks.tasks[0]) == [(prompt, "3$", 1.0), (prompt, "three$", 0.0)]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"prompt": "1", "chosen": "2"}, "task '1' has no answer in `rejected`"),
        ({"prompt": "1", "good": "2", "bad": "3"}, "e.g. columns.chosen=COLUMN (there is good, bad)"),
        ({"prompt": "1", "chosen": "", "rejected": "2"}, "task '1' has no answer in `chosen`"),
        ({"prompt": "1", "chosen": 2, "rejected": "2"}, "task '1' has no answer in `chosen`"),
        ({"prompt": "1", "chosen": [BETTER, BETTER], "rejected": "2"}, "it has 2 messages of its own"),
        ({"messages": MESSAGES, "chosen": MESSAGES, "rejected": "2"}, "it has 0 messages of its own"),
        ({"prompt": "1", "chosen": ["3"], "rejected": "2"}, "must be one message of the assistant"),
    ],
)
def test_task_without_a_pair_is_named(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as found:
        check_preferences(loaded(tmp_path, task))
    assert said in str(found.value) and re.match(r"/\S+\.jsonl:1: task '1'", str(found.value))


def test_conversations_that_have_nothing_in_common_are_no_task(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="`messages` must be a non-empty array of messages"):
        loaded(tmp_path, {"chosen": [BETTER], "rejected": [WORSE]})


def test_answer_that_is_too_long_is_named() -> None:
    with pytest.raises(TaskError, match="its answer has 6 tokens"):
        answered({"prompt": "1+2=", "chosen": "3", "rejected": "three"}, max_tokens=5)


def test_pairs_of_one_answer_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_preferences(loaded(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}))
    assert not caplog.records
    check_preferences(loaded(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "2"}))
    assert caplog.messages == ["1 of 1 pairs have the same answer twice, and teach nothing"]
