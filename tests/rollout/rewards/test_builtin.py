"""What the built-in rewards count."""

import importlib.util
from typing import Any

import pytest

from rollout.rewards.resolve import RewardSettingError, resolve_reward
from rollout.rewards.reward import RewardError
from tests.rollout.rewards.scoring import scored


@pytest.mark.parametrize(
    ("name", "text", "task", "expected"),
    [
        ("exact", " 58\n", {"answer": "58"}, 1),
        ("exact", "(58)", {"answer": "58"}, 0),
        ("exact", "3", {"answer": 3}, 1),
        ("numeric", "The sum is 85.", {"answer": "85"}, 1),
        ("numeric", "85 and then 86", {"answer": "85"}, 0),
        ("numeric", "it is $1,200.50!", {"answer": "#### 1200.5"}, 1),
        ("numeric", "18.0", {"answer": 18}, 1),
        ("numeric", "x = -5", {"answer": "-5"}, 1),
        ("numeric", "8-5", {"answer": "5"}, 1),
        ("numeric", "1e3", {"answer": "1000"}, 1),
        ("numeric", ".5", {"answer": "0.5"}, 1),
        ("numeric", "none", {"answer": "0"}, 0),
        ("exact", "85", {"answer": 85.0}, 1),
        ("exact", "-85", {"answer": "-85.0"}, 1),
        ("exact", "85.0", {"answer": "85.0"}, 1),
        ("exact", "8.5", {"answer": 8.5}, 1),
        ("exact", "v1", {"answer": "v1.0"}, 0),
        ("exact", "0.00001", {"answer": 0.00001}, 1),
        ("exact", "caf\u00e9", {"answer": "cafe\u0301"}, 1),
        ("exact", "a\nb", {"answer": "a\r\nb"}, 1),
        ("numeric", "also 2,5", {"answer": "2.5"}, 1),
        ("numeric", "1,500", {"answer": "1.5"}, 0),
        ("numeric", "12:30", {"answer": "30"}, 0),
        ("numeric", "in 3/4 of an hour", {"answer": "4"}, 0),
        ("regex", "well, yes!", {"pattern": "yes|ja"}, 1),
        ("regex", "well, yes!", {"pattern": r"\Ayes"}, 0),
        ("regex", "abc", {"answer": "a.c"}, 1),
        ("regex", "abc", {"answer": "abc", "pattern": "x"}, 0),
        ("length", "x" * 10, {"target_length": 10}, 1),
        ("length", "x" * 5, {"target_length": 10}, 0.5),
        ("length", "x" * 15, {"target_length": 10}, 0.5),
        ("length", "x" * 50, {"target_length": 10}, 0),
    ],
)
def test_built_in_reward(name: str, text: str, task: dict[str, Any], expected: float) -> None:
    assert scored(name, text, **task).reward == expected


@pytest.mark.parametrize(
    ("name", "task", "reason"),
    [
        ("exact", {}, "it has no `answer`"),
        ("exact", {"a": {"ground_truth": 1}}, "columns.answer=a.ground_truth (there is a.ground_truth)"),
        ("exact", {"answer": " "}, "its `answer` is empty"),
        ("exact", {"answer": "1 + 1\n#### 2"}, "is a whole solution; take the reward numeric or math"),
        ("exact", {"answer": "So it is $\\boxed{2}$."}, "is a whole solution"),
        ("regex", {"answer": "1 + 1\n#### 2"}, "is a whole solution"),
        ("regex", {"pattern": ""}, "its pattern is empty"),
        ("numeric", {"answer": "none"}, "its answer 'none' holds no number"),
        ("numeric", {"answer": "1, 2"}, "its answer '1, 2' is not a single number: write ####"),
        ("numeric", {"answer": "12:30"}, "is not a single number"),
        ("numeric", {"answer": "3-5"}, "is not a single number"),
        ("numeric", {"answer": "2024-05-01"}, "is not a single number"),
        ("regex", {}, "neither a `pattern` nor an `answer`"),
        ("regex", {"pattern": "("}, "is not a regular expression"),
        ("length", {}, "`target_length` must be a number of characters above 0, got None"),
        ("length", {"target_length": 0}, "got 0"),
        ("length", {"target_length": True}, "got True"),
    ],
)
def test_task_that_a_built_in_reward_cannot_use_is_an_error(
    name: str, task: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RewardError) as raised:
        scored(name, "x", **task)
    assert f"reward '{name}', task 't1'" in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(("name", "extra"), [("math", "math"), ("reasoning_gym", "gym")])
def test_reward_of_a_library_that_is_not_there_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RewardSettingError, match=rf"not installed; .* pip install -e '\.\[{extra}\]'"):
        resolve_reward(name)
