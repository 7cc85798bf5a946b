"""The reward `math`: is the completion's final answer mathematically the task's? By math-verify (extra
`math`), in processes that may be killed: sympy can compute for hours.
"""

import functools
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rollout.processes.killable_rewards import LibraryReward
from rollout.rewards.solutions import behind_mark
from rollout.tasks.fields import name_of_answer
from rollout.tasks.messages import answer_of

_MATH_MARKS = ("$", "\\(", "\\[", "\\boxed", "\\begin{")
_SCIENTIFIC = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,2}(?![\w.]*\w)")
"""A number with an exponent, as programs print it, in which the library would read Euler's number."""
_THOUSANDS = re.compile(r"(?<=[0-9])\\[,;:!](?=[0-9]{3}(?![0-9]))")
"""A thin space that groups digits."""


def make_verifier() -> Callable[[str, str], float]:
    """Make, in a process of the pool, (answer, completion) -> 1 if the completion's final answer equals the
    answer. The final answer is the last \\boxed, else the last formula or number. The answer is LaTeX, or
    text with LaTeX between $ or in \\boxed. If it holds no mathematics, the function raises ValueError.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        # The library's own timeouts are signals, which do not stop C code; here the process is killed.
        text = _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", _THOUSANDS.sub("", text))
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    @functools.lru_cache(maxsize=1024)  # the samples of a group have the same answer
    def expected(answer: str) -> list[Any]:
        is_marked = any(mark in answer for mark in _MATH_MARKS)
        # In unmarked LaTeX the library would take the last number only.
        expressions = (is_marked and parsed(answer)) or parsed(f"\\boxed{{{answer}}}")
        if not expressions:
            raise ValueError(f"its answer {answer!r} holds no mathematics")
        return expressions

    def verifier(answer: str, completion: str) -> float:
        return float(verify(expected(answer), parsed(completion), timeout_seconds=None))

    return verifier


def _arguments(task: dict[str, Any], completion: str) -> tuple[str, str]:
    if (answer := answer_of(task)) is None:
        raise ValueError(f"it has no `answer`; {name_of_answer(task)}")
    return behind_mark(str(answer)), completion


math_reward = LibraryReward(
    "rollout.rewards.math:make_verifier", _arguments, library="math_verify", extra="math"
)
