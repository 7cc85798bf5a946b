"""Answers that are whole solutions, with the answer itself behind `####` or in `\\boxed{...}`."""

import re

_MARKED = re.compile(r"####\s*\S{1,40}\s*\Z|\S.*\\boxed\{", re.DOTALL)


def refuse_solution(answer: str) -> None:
    """Raise ValueError for an answer that no completion will be, or have in it, word by word."""
    if _MARKED.search(answer):
        start = answer if len(answer) <= 60 else f"{answer[:57]}..."
        raise ValueError(
            f"its answer {start!r} is a whole solution; take the reward numeric or math, which look for its "
            "end, or a column with the answer alone"
        )


def behind_mark(answer: str) -> str:
    """Return the text behind the last `####` of an answer; all of it if there is none."""
    return answer.rpartition("####")[2]
