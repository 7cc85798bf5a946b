"""Count and time the calls of this process on the shared directory, by phase of the protocol table.

Each call goes through `retry`, or is the `drop` of a file that does no harm if it stays. A call of the main
thread holds up the phase that it is made in; calls of other threads (heartbeats, removals) do not.
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
"""What the calls of other threads are counted as, in place of a phase."""
SUM = "sum of the rows"


class Calls:
    """The calls that this process makes from now on."""

    def __init__(self) -> None:
        self.phase = ""
        """The phase that the main thread is in."""
        self.count: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        """By phase, by what a call does."""
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
                self._add(self.phase if is_main else BESIDE, name(arguments), time.perf_counter() - began_s)

        return timed

    def _add(self, phase: str, what: str, seconds: float) -> None:
        with self._lock:
            self.count[phase][what] += 1
            self.seconds[phase][what] += seconds

    def clear(self) -> None:
        """Count anew."""
        with self._lock:
            self.count.clear()
            self.seconds.clear()

    def per_iteration(self, iterations: int) -> dict[str, dict[str, tuple[float, float]]]:
        """Return, by phase, by what a call does, how many calls there were and their milliseconds."""
        return {
            phase: {
                what: (number / iterations, 1e3 * self.seconds[phase][what] / iterations)
                for what, number in sorted(counted.items())
            }
            for phase, counted in self.count.items()
        }


def table(phases: Sequence[str], master: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Return a table in Markdown: what `per_iteration` gave of the master, and of a worker, by phase."""
    lines = ["| phase | master | ms | a worker | ms |", "|---|---|---|---|---|"]
    for phase in (*phases, BESIDE):
        cells = [cell for node in (master, worker) for cell in _cells(node.get(phase, {}))]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    sums = [cell for node in (master, worker) for cell in _sums(node.get(phase, {}) for phase in phases)]
    return "\n".join([*lines, f"| {SUM} | {' | '.join(sums)} |"])


def _cells(calls: Mapping[str, tuple[float, float]]) -> tuple[str, str]:
    text = ", ".join(f"{number:.3g} {what}" for what, (number, _) in calls.items())
    return text or "none", f"{sum(ms for _, ms in calls.values()):.1f}"


def _sums(phases: Iterable[Mapping[str, tuple[float, float]]]) -> tuple[str, str]:
    calls = [call for phase in phases for call in phase.values()]
    return f"{sum(number for number, _ in calls):.4g}", f"{sum(ms for _, ms in calls):.1f}"
