"""The environment `calculator`: several turns, in which the model may use a tool."""

import asyncio
import re
from fractions import Fraction

from rollout.environments.policy import Episode, Policy
from rollout.environments.turns import Prompt, opening
from rollout.origin import Sampling
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample

OPEN, CLOSE = "<<", ">>"
MAX_CALLS = 8
"""How often a sample may use the calculator."""
HINT = (
    f"You have a calculator: write an expression between {OPEN} and {CLOSE}, e.g. {OPEN}12*(3+4){CLOSE}, "
    "and its value appears behind it. Give your answer after the last use of it."
)
MAX_CHARACTERS = 200
MAX_DEPTH = 20
"""How deeply parentheses and signs may be nested."""
MAX_DIGITS = 40
"""Digits that the numerator and the denominator of a value may have."""

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))", re.ASCII)


class ExpressionError(ValueError):
    """An expression without a value; the message is short, for the model to read."""


async def calculator(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Answer the task's prompt, or its messages (with HINT before the first), `sampling.n` times. The model
    may write `<<EXPRESSION>>` up to MAX_CALLS times. Each time it is interrupted, `=VALUE` and a newline are
    appended (not trained), and it goes on in the same turn. An expression that is still open at the end of
    the turn is evaluated too. The reward function gets the text after the last value.

    The metric `calls` says how often the calculator was used.
    """
    policy = policy.for_task(task)
    async with asyncio.TaskGroup() as group:
        plays = [group.create_task(_play(_prompt(task), policy.episode(j))) for j in range(sampling.n)]
    return [play.result() for play in plays]


async def _play(prompt: Prompt, episode: Episode) -> Sample:
    turn = await episode.generate(prompt, stop=[CLOSE])
    calls = 0
    while turn.finish_reason == "stop" and OPEN in turn.text and calls < MAX_CALLS:
        calls += 1
        expression = turn.text.rpartition(OPEN)[2]
        turn = await episode.generate(f"={answer(expression)}\n", stop=[CLOSE] if calls < MAX_CALLS else [])
    return episode.sample(metrics={"calls": float(calls)})


def _prompt(task: Task) -> Prompt:
    beginning = opening(task)
    if isinstance(beginning, str):
        return beginning
    first, *later_messages = beginning
    return [{**first, "content": f"{HINT}\n\n{first['content']}"}, *later_messages]


def answer(expression: str) -> str:
    """Return the value as the model reads it: an integer, a decimal number of 10 significant digits, or an
    error.
    """
    try:
        value = evaluate(expression)
    except ExpressionError as error:
        return f"error: {error}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression of numbers, + - * / and parentheses. ExpressionError says why
    there is none. The limits above bound the time.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError("too long")
    return _Parser(_tokens(expression)).value()


def _tokens(expression: str) -> list[str]:
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"cannot read {text[position:].strip()[0]!r}")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent: sums of products of signed numbers and parentheses."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._tokens:
            raise ExpressionError(f"unexpected {self._tokens[-1]!r}")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            value = _limited(
                value + self._product() if self._tokens.pop() == "+" else value - self._product()
            )
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next() in ("*", "/"):
            operator, factor = self._tokens.pop(), self._factor()
            if operator == "/" and factor == 0:
                raise ExpressionError("division by zero")
            value = _limited(value * factor if operator == "*" else value / factor)
        return value

    def _factor(self) -> Fraction:
        if not self._tokens:
            raise ExpressionError("unexpected end")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError("nested too deeply")
        token = self._tokens.pop()
        if token in ("+", "-"):
            value = self._factor() if token == "+" else -self._factor()
        elif token == "(":
            value = self._sum()
            if self._next() != ")":
                raise ExpressionError("a parenthesis is not closed")
            self._tokens.pop()
        elif token[0] in "*/)":
            raise ExpressionError(f"unexpected {token!r}")
        else:
            value = _limited(Fraction(token))
        self._depth -= 1
        return value

    def _next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None


def _limited(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ExpressionError("too large")
    return value
