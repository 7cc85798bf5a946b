"""Count and time the calls of this process on the shared directory, by row of the protocol table.

Each call goes through `retry`, or is the `drop` of a file that does no harm if it stays. A call of the main
thread holds up the row that it is made in; calls of other threads (heartbeats, removals) do not.
"""

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from rollout.storage import files
from rollout.storage import retry as retry_module

T = TypeVar("T")

BESIDE = "beside"
"""What the calls of other threads are counted as, in place of a row."""
SUM = "sum of the rows"


class Calls:
    """The calls that this process makes from now on."""

    def __init__(self) -> None:
        self.row = ""
        """The row that the main thread is in."""
        self.count: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        """By row, by what a call does."""
        self._lock = threading.Lock()
        self._nested = threading.local()
        real = retry_module.retry
        timed = self._timed(real, lambda arguments: arguments[0])
        for name, module in list(sys.modules.items()):
            if name.startswith(("coordinator.", "rollout.")) and vars(module).get("retry") is real:
                vars(module)["retry"] = timed
        files.drop = self._timed(files.drop, lambda _: "remove")

    def _timed(self, call: Callable[..., T], name: Callable[[Sequence[Any]], str]) -> Callable[..., T]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> T:
            if getattr(self._nested, "is_in", False):  # a part of another call
                return call(*arguments, **named)
            self._nested.is_in = True
            began_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._nested.is_in = False
                is_main = threading.current_thread() is threading.main_thread()
                self._add(self.row if is_main else BESIDE, name(arguments), time.perf_counter() - began_s)

        return timed

    def _add(self, row: str, what: str, seconds: float) -> None:
        with self._lock:
            self.count[row][what] += 1
            self.seconds[row][what] += seconds

    def clear(self) -> None:
        """Count anew."""
        with self._lock:
            self.count.clear()
            self.seconds.clear()

    def per_iteration(self, iterations: int) -> dict[str, dict[str, tuple[float, float]]]:
        """Return, by row, by what a call does, how many calls there were and their milliseconds."""
        return {
            row: {
                what: (number / iterations, 1e3 * self.seconds[row][what] / iterations)
                for what, number in sorted(counted.items())
            }
            for row, counted in self.count.items()
        }


def table(rows: Sequence[str], master: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Return a table in Markdown: what `per_iteration` gave of the master, and of a worker, by row."""
    lines = ["| row | master | ms | a worker | ms |", "|---|---|---|---|---|"]
    for row in (*rows, BESIDE):
        cells = [cell for node in (master, worker) for cell in _cells(node.get(row, {}))]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    sums = [cell for node in (master, worker) for cell in _sums(node.get(row, {}) for row in rows)]
    return "\n".join([*lines, f"| {SUM} | {' | '.join(sums)} |"])


def _cells(calls: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    text = ", ".join(f"{number:.3g} {what}" for what, (number, _) in calls.items())
    return text or "none", f"{sum(ms for _, ms in calls.values()):.1f}"


def _sums(rows: Iterable[Mapping[str, tuple[float, float]]]) -> tuple[str, str]:
    calls = [call for row in rows for call in row.values()]
    return f"{sum(number for number, _ in calls):.4g}", f"{sum(ms for _, ms in calls):.1f}"
