"""Rewards: score a completion by a built-in function, a library, the user's function, or several of them."""

import re
import unicodedata
from decimal import Decimal

from rollout.processes.killable_rewards import SyncReward
from rollout.rewards.numbers import last_number, single_number, with_decimal_commas
from rollout.rewards.regex import regex
from rollout.rewards.reward import RewardFunction
from rollout.rewards.solutions import refuse_solution
from rollout.tasks.fields import name_of_answer, whole_number
from rollout.tasks.messages import answer_of
from rollout.tasks.task_set import Task


def exact(task: Task, completion: str) -> float:
    """1 if the completion, stripped, is the answer. A whole number is one also where a table has made 85.0
    of it.
    """
    answer, text = _plain(answer_text(task)), _plain(completion)
    if not answer:
        raise ValueError("its `answer` is empty")
    refuse_solution(answer)
    integer = re.sub(r"^([-+]?[0-9]+)\.0$", r"\1", answer)
    return float(text in (answer, integer))


def _plain(text: str) -> str:
    """Return a text without outer spaces, in the one form that Unicode has for what looks the same."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()


def numeric(task: Task, completion: str) -> float:
    """1 if the completion's last number equals the answer, which is a single number (`#### 1,200` equals
    1200.0). Both are read as `rollout.rewards.numbers` says; `2,5` at the end is 5, and 2.5 too.
    """
    answer = answer_text(task)
    target = single_number(answer)
    if target is None and not re.search("[0-9]", answer):
        raise ValueError(f"its answer {answer!r} holds no number")
    if target is None:
        raise ValueError(
            f"its answer {answer!r} is not a single number: write #### before the one that counts, a decimal "
            "comma as a point, or take the reward exact or math"
        )
    return float(target in (last_number(completion), last_number(with_decimal_commas(completion))))


def length(task: Task, completion: str) -> float:
    """1 - |length - target| / target, at least 0. Lengths are in characters; the target is the task's field
    `target_length`.
    """
    target = task.get("target_length")
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0:
        raise ValueError(f"its `target_length` must be a number of characters above 0, got {target!r}")
    return max(0.0, 1.0 - abs(len(completion) - target) / target)


BUILT_IN: dict[str, RewardFunction | SyncReward] = {
    "exact": exact,
    "numeric": numeric,
    "regex": SyncReward("rollout.rewards.regex:regex", regex),
    "length": length,
}


def answer_text(task: Task) -> str:
    """Return the answer of a task as a text: a number with all its digits, a whole one without a fraction."""
    if (answer := answer_of(task)) is None:
        raise ValueError(f"it has no `answer`; {name_of_answer(task)}")
    value = whole_number(answer)
    return f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value)  # not 1e-05
