"""The reward `regex`. A pattern may take longer than the world lasts, and nothing else in its process runs
meanwhile, so it runs in processes that may be killed.
"""

import re
from typing import Any

from rollout.rewards.solutions import refuse_solution


def regex(task: dict[str, Any], completion: str) -> float:
    """1 if the pattern is found anywhere in the completion (to match all of it, anchor it with \\A and \\Z).
    The pattern is the task's field `pattern`, or its answer if there is none.
    """
    pattern = pattern_of(task)
    try:
        return float(re.search(pattern, completion) is not None)
    except re.error as error:
        raise ValueError(f"its pattern {pattern!r} is not a regular expression: {error}") from error


def pattern_of(task: dict[str, Any]) -> str:
    """Return the pattern of a task; ValueError if it has none."""
    pattern = task.get("pattern", task.get("answer"))
    if not isinstance(pattern, str):
        raise ValueError("it has neither a `pattern` nor an `answer` that is a string")
    if not pattern:
        raise ValueError("its pattern is empty, which is found in every text")
    if "pattern" not in task:
        refuse_solution(pattern)
    return pattern
