"""The reward `math`: is the completion's final answer mathematically the task's? By math-verify (extra
`math`), in processes that may be killed: sympy can compute for hours.
"""

import functools
from collections.abc import Callable
from typing import Any

from rollout.processes.reward import ProcessReward

_MATH_MARKS = ("$", "\\(", "\\[", "\\boxed", "\\begin{")


def make_verifier() -> Callable[[str, str], float]:
    """For the pool's processes: (answer, completion) -> 1 if the completion's final answer (the last \\boxed,
    else the last formula or number) equals the answer, which is LaTeX, or text with LaTeX between $ or in
    \\boxed. ValueError if the answer holds no mathematics.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        # The library's own timeouts are signals, which C code does not heed; here the process is killed.
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    @functools.lru_cache(maxsize=1024)  # a group's samples share it
    def wanted(answer: str) -> list[Any]:
        is_marked = any(mark in answer for mark in _MATH_MARKS)
        # Out of unmarked LaTeX the library would take the last number.
        found = parsed(answer if is_marked else f"\\boxed{{{answer}}}")
        if not found:
            raise ValueError(f"its answer {answer!r} holds no mathematics")
        return found

    def verifier(answer: str, completion: str) -> float:
        return float(verify(wanted(answer), parsed(completion), timeout_seconds=None))

    return verifier


def _arguments(task: dict[str, Any], completion: str) -> tuple[str, str]:
    if "answer" not in task:
        raise ValueError("it has no `answer`")
    return str(task["answer"]), completion


math_reward = ProcessReward(
    "rollout.rewards.math:make_verifier", _arguments, library="math_verify", extra="math"
)
