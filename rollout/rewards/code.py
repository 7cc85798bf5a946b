"""The reward `code`: what a completion's program passes of the task's tests, in jails (`rollout.sandbox`).

--reward code,score=fraction,cpu_s=5
"""

import hashlib
import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollout.processes.killable_process import CallFailed
from rollout.processes.killable_rewards import SyncReward
from rollout.rewards.parts import parameters_of
from rollout.sandbox import peers
from rollout.sandbox.run import Jail, Limits, run, why_no_sandbox

NAME = "code"
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_KNOWN: dict[str, Callable[[str], Any]] = {
    "score": str, "name": str, "wall_s": float, "cpu_s": int, "memory_mib": int, "processes": int,
    "disk_mib": int,
}  # fmt: skip
_AT_LEAST = {"wall_s": 0.001, "cpu_s": 1, "memory_mib": 1, "processes": 1, "disk_mib": 1}
_SCORES = ("all", "fraction")


def is_code(name: str) -> bool:
    """Return whether a reward's name is this reward's, with or without parameters."""
    return name.partition(",")[0] == NAME


class CodeReward(SyncReward):
    """The reward with its parameters: it is called as a sync function of the user's is."""

    def __init__(self, name: str) -> None:
        """`name`: the setting. Raises ValueError, in one line, for one that is wrong."""
        _, *pairs = name.split(",")
        parameters = parameters_of(pairs, _KNOWN, _AT_LEAST)
        self.title = parameters.pop("name", NAME)
        self._score = parameters.pop("score", _SCORES[0])
        if self._score not in _SCORES:
            raise ValueError(f"score={self._score}: give one of {', '.join(_SCORES)}")
        self.limits = Limits(**parameters)
        self.digest = hashlib.sha256(f"{self._score} {self.limits}".encode()).hexdigest()
        """Digest of the parameters."""
        super().__init__("rollout.rewards.code:code", code, self._score, asdict(self.limits))

    @property
    def missing(self) -> str | None:
        """Why this machine cannot run code within the limits; None if it can."""
        return why_no_sandbox(self.limits)

    def check(self, task: dict[str, Any]) -> None:
        """Raise ValueError if no completion of the task can be scored."""
        _tests(task)

    async def __call__(
        self, task: dict[str, Any], completion: str, *, timeout_s: float, processes: int | None
    ) -> Any:
        if self.limits.wall_s >= timeout_s:
            raise CallFailed(
                f"wall_s={self.limits.wall_s:g} must be below rollout.reward_timeout_s={timeout_s:g}"
            )
        return await super().__call__(task, completion, timeout_s=timeout_s, processes=processes)


def code(task: dict[str, Any], completion: str, score: str, limits: dict[str, Any]) -> dict[str, float]:
    """Return the `reward`, and as `passed` the fraction of the task's tests that the completion passes. With
    the score `all` the reward is 1 if that is all of them, else 0. All tests together may take `wall_s`.
    """
    tests, within = _tests(task), Limits(**limits)
    program = program_of(completion)
    if isinstance(tests[0], str):
        passed = _called(program, [str(task.get("setup", "")), *tests], within)
    else:
        passed = _printed(program, tests, within)
    fraction = passed / len(tests)
    return {"reward": fraction if score == "fraction" else float(fraction == 1), "passed": fraction}


def program_of(completion: str) -> str:
    """Return the last fenced block of Python, or of no language; all of the text if there is none."""
    blocks = [text for kind, text in _BLOCK.findall(completion) if kind.strip().lower() in _PYTHON]
    return blocks[-1] if blocks else completion


def _called(program: str, tests: list[str], limits: Limits) -> int:
    """Return how many tests call the program without an error; the first text only prepares them."""
    source = Path(peers.__file__).read_text(encoding="utf-8")
    answer_end, tests_end = socket.socketpair()
    with ExitStack() as stack:
        with answer_end, tests_end:
            sides = ({"answer.py": program}, answer_end), ({"tests.json": json.dumps(tests)}, tests_end)
            answering, testing = [
                stack.enter_context(Jail({"main.py": source, **files}, limits, stdin=end))
                for files, end in sides
            ]
        lines = testing.outcome().stdout.split(
            "\n"
        )  # not at \r: why a test has failed is a text of the program
        answering.check()
    return sum(line == "1" for line in lines[: len(tests) - 1])


def _printed(program: str, cases: list[dict[str, str]], limits: Limits) -> int:
    """Return for how many cases the program prints what it should, and ends without an error."""
    ends_s, passed = time.monotonic() + limits.wall_s, 0
    for case in cases:
        if (left_s := ends_s - time.monotonic()) <= 0:
            break
        ended = run(program, case["stdin"], replace(limits, wall_s=left_s))
        passed += ended.exit_code == 0 and _lines(ended.stdout) == _lines(case["stdout"])
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _tests(task: dict[str, Any]) -> list[Any]:
    """Return the tests of a task; ValueError if they are none."""
    tests = task.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests:
        raise ValueError("it has no `tests`: a list of Python texts, or of objects with `stdin` and `stdout`")
    if all(isinstance(test, str) for test in tests):
        for test in [task.get("setup", ""), *tests]:
            try:
                compile(test, "test", "exec")
            except (SyntaxError, ValueError, TypeError) as error:
                raise ValueError(f"its test {test!r:.200} is not Python: {error}") from None
        return tests
    for test in tests:
        if not isinstance(test, dict) or not all(isinstance(test.get(n), str) for n in ("stdin", "stdout")):
            raise ValueError(f"its test {test!r:.200} has not the texts `stdin` and `stdout`, as the others")
    return tests
