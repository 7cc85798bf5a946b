"""Read metrics.jsonl on from where it was read to: it has a line for each iteration, and is read in each."""

import contextlib
import json
from typing import Any

from coordinator.directory.layout import RunDir
from rollout.storage import files

Line = dict[str, Any]

MEASURES = ("eval_reward", "reward")
"""What of a line says how good a policy is; the first that the run has counts."""
SCORES = "eval"
"""What a line has of the named sets of an evaluation, by name."""


class NewLines:
    """Returns each line of metrics.jsonl once, whatever appends to it meanwhile."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read = 0
        """Bytes of the lines that were returned for good."""
        self._last: bytes = b""
        """The last of these lines. While it is where it was, nothing before it has changed."""

    def read(self) -> tuple[list[Line], bool]:
        """Return the new lines, and whether they are all there are: the file may be another one than before.

        A last line that has no end yet is returned if it is whole, and again by the next call. Anything that
        is no line of an iteration is left out.
        """
        data = self._bytes_from(self._read - len(self._last))
        is_anew = self._read == 0 or not data.startswith(self._last)
        if is_anew and self._read:
            self._read, self._last = 0, b""
            data = self._bytes_from(0)
        data = data[len(self._last) :]
        lines = data[: data.rfind(b"\n") + 1]
        self._read += len(lines)
        self._last = lines[lines.rfind(b"\n", 0, -1) + 1 :] or self._last
        return [line for text in data.splitlines() if (line := _parsed(text)) is not None], is_anew

    def _bytes_from(self, start: int) -> bytes:
        path = self._run_dir.metrics
        with contextlib.suppress(FileNotFoundError):  # nobody has made it yet
            return files.read_from(path, start) if path.name in files.listing(path.parent) else b""
        return b""


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    entry: Line = line  # pyright: ignore[reportUnknownVariableType]
    return entry if isinstance(entry.get("iteration"), int) and isinstance(entry.get("kind"), str) else None


def measured(line: Line) -> int:
    """Return the iteration whose training made the policy that a line measures."""
    number = line.get("policy_iteration")
    return number if isinstance(number, int) else line["iteration"] - 1


class MetricsFile:
    """All lines of metrics.jsonl, for what shows them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._new = NewLines(run_dir)
        self._found: dict[tuple[int, str], Line] = {}
        self._sorted: list[Line] = []

    def read(self) -> list[Line]:
        """Return the lines by iteration; do not change them. Of an iteration and kind only the first one is
        taken: a master that was suspended while it appended a line may append it again.
        """
        lines, is_anew = self._new.read()
        if is_anew:
            self._found = {}
        for line in lines:
            self._found.setdefault((line["iteration"], line["kind"]), line)
        if is_anew or lines:
            self._sorted = sorted(self._found.values(), key=lambda line: line["iteration"])
        return self._sorted


class FinishedIterations:
    """What a node has to know of metrics.jsonl in each iteration. Of the lines before the newest one it keeps
    at most a number each.
    """

    def __init__(self, run_dir: RunDir, keeps_scores: bool = False, by: str | None = None) -> None:
        """`keeps_scores`: whether `score` will be asked; `by`: for the score of this set of an evaluation."""
        self._new = NewLines(run_dir)
        self._keeps_scores = keeps_scores
        self._by = by
        self._forget()

    def _forget(self) -> None:
        self._last: dict[str, int] = {}
        self._scores: dict[str, dict[int, float]] = {name: {} for name in MEASURES}
        self.newest: Line | None = None
        """The line of the highest iteration."""

    def look(self) -> "FinishedIterations":
        """Read the new lines."""
        lines, is_anew = self._new.read()
        if is_anew:
            self._forget()
        for line in lines:
            self._take(line)
        return self

    def _take(self, line: Line) -> None:
        iteration, kind = line["iteration"], line["kind"]
        if iteration <= self._last.get(kind, 0):
            return  # a master that was suspended while it appended a line may append it again
        self._last[kind] = iteration
        if self.newest is None or iteration >= self.newest["iteration"]:
            self.newest = line
        measures: dict[str, Any] = {name: line.get(name) for name in MEASURES}
        if self._by is not None:
            sets: dict[str, Line] = line.get(SCORES) or {}
            measures = {MEASURES[0]: sets.get(self._by, {}).get("reward")}
        for name, value in measures.items() if self._keeps_scores else ():
            if value is not None:
                self._scores[name][measured(line)] = value

    def last(self, *kinds: str) -> int:
        """Return the last iteration that a run of one of these kinds had finished at the last look; 0 for
        none. A run of one kind finishes its iterations in order.
        """
        return max((self._last.get(kind, 0) for kind in kinds), default=0)

    def score(self, checkpoint: int) -> float | None:
        """Return how good the policy of a checkpoint is. An iteration that it sampled has measured that: by
        its evaluation, or, in a run without evaluations, by the reward of its samples. None: nothing has yet.
        With `by` only that set counts.
        """
        by_evaluation, by_samples = (self._scores[name] for name in MEASURES)
        return (by_evaluation or by_samples).get(checkpoint)
