"""The scores of an evaluation, for people: each with the interval that the score on all such tasks is in."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from coordinator.console.views.heartbeats import is_number
from coordinator.directory.metrics_file import SCORES

INTERVAL = 1.96
"""Standard errors on each side of a mean that make an interval of 95 %."""


class Score(NamedTuple):
    """A score; its name is that of a set, or `eval_reward`."""

    name: str
    reward: float
    error: float | None
    """Its standard error."""

    def __str__(self) -> str:
        """`0.612 ± 0.041`."""
        return f"{self.reward:.3f}{self.margin}"

    @property
    def margin(self) -> str:
        """` ± 0.041`, half the width of the interval; empty for a score of one task."""
        return "" if self.error is None else f" \N{PLUS-MINUS SIGN} {INTERVAL * self.error:.3f}"


def scores(line: Mapping[str, Any]) -> list[Score]:
    """Return the scores of a metrics line: `eval_reward`, then those of the named sets. What is no number is
    left out.
    """
    sets: Any = line.get(SCORES)
    named = cast("dict[str, Any]", sets) if isinstance(sets, dict) else {}
    fields: list[tuple[str, Any, Any]] = [("eval_reward", line.get("eval_reward"), line.get("eval_error"))]
    for name, entry in named.items():
        scored = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        fields.append((name, scored.get("reward"), scored.get("error")))
    return [
        Score(name, reward, error if is_number(error) else None)
        for name, reward, error in fields
        if is_number(reward)
    ]


def history(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, Score]]]:
    """Return the scores of metrics lines by name, each with the iteration of its line."""
    by_name: dict[str, list[tuple[int, Score]]] = {}
    for line in lines:
        for score in scores(line):
            by_name.setdefault(score.name, []).append((line["iteration"], score))
    return by_name
