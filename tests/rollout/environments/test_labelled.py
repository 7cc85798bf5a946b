"""The environment `labelled`: one sample of a task, good or bad, and what a task file may look like."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.labelled import check_labels, labelled
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.tasks.task_set import TaskError, load_tasks
from tests.rollout.environments.test_demonstration import ASKED, CHAT, MESSAGES, parts_of
from tests.rollout.environments.test_preference import loaded

WRONG = {"role": "assistant", "content": "4"}


def answered(task: dict[str, Any]) -> tuple[str, str, float | None]:
    """Prompt, trained text and reward of the one sample."""
    sampling = Sampling(n=8, max_tokens=50)
    (sample,) = asyncio.run(labelled(task, Policy(CHAT, sampling, 0), sampling, (ord("$"),)))
    return (*parts_of(sample), sample.reward)


@pytest.mark.parametrize(
    ("task", "prompt", "label"),
    [
        ({"prompt": "1+2=", "completion": "4", "label": False}, "^1+2=", 0.0),
        ({"prompt": "1+2=", "answer": "4", "label": 1}, "^1+2=", 1.0),
        ({"prompt": MESSAGES, "completion": [WRONG], "label": True}, ASKED, 1.0),
        ({"prompt": MESSAGES, "completion": [WRONG], "label": 0.0}, ASKED, 0.0),
        ({"messages": MESSAGES, "completion": "4", "label": "False"}, ASKED, 0.0),
        ({"messages": [*MESSAGES, WRONG], "label": "true"}, ASKED, 1.0),
    ],
    ids=["texts", "answer", "TRL's messages", "numbers", "a table of texts", "whole conversations"],
)
def test_answer_has_the_reward_of_its_label(
    tmp_path: Path, task: dict[str, Any], prompt: str, label: float
) -> None:
    tasks = loaded(tmp_path, task)
    check_labels(tasks)
    assert answered(tasks.tasks[0]) == (prompt, "4$", label)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"prompt": "1", "completion": "2"}, "task '1': its `label` is None, neither true nor false; name"),
        ({"prompt": "1", "completion": "2", "label": 3}, "its `label` is 3, neither true nor false"),
        ({"prompt": "1", "label": True}, "task '1' has no answer to demonstrate"),
        ({"prompt": "1", "completion": "", "label": True}, "task '1' has no answer to demonstrate"),
        ({"prompt": MESSAGES, "completion": [WRONG, WRONG], "label": True}, "task '1': `completion` must be"),
    ],
)
def test_task_without_answer_or_label_is_named(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as found:
        check_labels(loaded(tmp_path, task))
    assert said in str(found.value) and re.match(r"/\S+\.jsonl:1: task '1'", str(found.value))


def test_labels_of_a_table_may_have_another_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"messages": [[*MESSAGES, WRONG]] * 2, "kto_tag": [True, False]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "labels.parquet")
    columns = {"label": "kto_tag"}
    tasks = load_tasks(str(tmp_path / "labels.parquet"), seed=0, split="train", columns=columns)
    check_labels(tasks)
    assert [answered(task)[2] for task in tasks.tasks] == [1.0, 0.0]
