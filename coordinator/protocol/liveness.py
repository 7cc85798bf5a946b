"""Watch who still beats, and who still gets on, by this node's own clock.

No two machines' clocks are compared. No timer here counts the time in which this process was suspended, or in
which its filesystem did not answer: such a node declares no other node lost.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import Board
from coordinator.settings.tree import RunSettings

STARTS = 2
"""An engine that does not start is started once more."""


class Ticks:
    """Counts seconds between calls, at most `step_s` for each: a longer gap means that this process stood."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._last_s: float | None = None

    def restart(self) -> None:
        """Count from the next call on."""
        self._last_s = None

    def passed_s(self, now_s: float) -> float:
        """Return the seconds since the last call; `now_s` is monotonic."""
        passed_s = self.since_s(now_s)
        self._last_s = now_s
        return passed_s

    def since_s(self, now_s: float) -> float:
        """Return the seconds that `passed_s` would return, and go on counting from the last call."""
        return 0.0 if self._last_s is None else min(now_s - self._last_s, self.step_s)


class Stopwatch:
    """Measures seconds since `restart`, without those in which this process was suspended; for any thread."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: `look` is called more often than this."""
        self._ticks = Ticks(step_s)
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin at 0 again."""
        with self._lock:
            self._passed_s = 0.0
            self._ticks.restart()
            self._ticks.passed_s(time.monotonic())

    def look(self) -> float:
        """Return the seconds since `restart`."""
        with self._lock:
            self._passed_s += self._ticks.passed_s(time.monotonic())
            return self._passed_s


class Silence:
    """For how long each rank's heartbeat has stood still, counted over successful listings alone."""

    def __init__(self, beat_s: float) -> None:
        self._ticks = Ticks(2 * beat_s)
        self._marks: dict[int, tuple[int, int]] = {}
        self.silent_s: dict[int, float] = {}

    def beat_every(self, beat_s: float) -> None:
        """Count from now on for nodes that beat this often."""
        self._ticks.step_s = 2 * beat_s

    def observe(self, board: Board, ranks: Iterable[int], now_s: float) -> None:
        """Take in one successful listing at `now_s` (monotonic)."""
        passed_s = self._ticks.passed_s(now_s)
        for rank in ranks:
            beat = board.beats.get(rank)
            mark = (beat.incarnation, beat.counter) if beat else (0, 0)
            if mark > self._marks.get(rank, (-1, -1)):
                self._marks[rank] = mark
                self.silent_s[rank] = 0.0
            else:
                self.silent_s[rank] = self.silent_s.get(rank, 0.0) + passed_s

    def so_far(self, now_s: float) -> dict[int, float]:
        """Return the silence of each rank at `now_s` (monotonic), with the time since the last listing."""
        since_s = self._ticks.since_s(now_s)
        return {rank: silent_s + since_s for rank, silent_s in dict(self.silent_s).items()}

    def restart(self, ranks: Iterable[int]) -> None:
        """Count anew for `ranks`, from the next listing on: they have just been admitted."""
        self._ticks.restart()
        for rank in ranks:
            self.silent_s[rank] = 0.0


class Standstill:
    """For how long the phase and the progress of each rank have stood still, although it beats.

    A rank that waits for others does not stand still.
    """

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: how often progress is observed."""
        self._interval_s = interval_s
        self._observed_s = float("-inf")
        self._ticks = Ticks(2 * interval_s)
        self._places: dict[int, tuple[Any, ...]] = {}
        self.still_s: dict[int, float] = {}

    def is_due(self, now_s: float) -> bool:
        """Return whether progress is to be observed again at `now_s` (monotonic)."""
        return now_s - self._observed_s >= self._interval_s

    def observe(self, heartbeats: Mapping[int, Mapping[str, Any]], now_s: float) -> None:
        """Take in what the newest beat of each rank says, at `now_s` (monotonic)."""
        self._observed_s, passed_s = now_s, self._ticks.passed_s(now_s)
        for rank, content in heartbeats.items():
            place = tuple(content.get(name) for name in ("state", "iteration", "phase", "done", "steps"))
            moves = place != self._places.get(rank) or bool(content.get("waiting_for"))
            self._places[rank] = place
            self.still_s[rank] = 0.0 if moves else self.still_s.get(rank, 0.0) + passed_s

    def forget(self, ranks: Collection[int]) -> None:
        """Drop ranks that do not even beat."""
        for rank in ranks:
            self._places.pop(rank, None)
            self.still_s.pop(rank, None)

    def beyond(self, limit_s: Callable[[str], float | None], grace_s: float) -> set[int]:
        """Return the ranks that have stood still for longer than the limit of their phase, and `grace_s`."""
        limits = {rank: limit_s(str(place[2])) for rank, place in dict(self._places).items()}
        return {
            rank for rank, most_s in limits.items()
            if most_s is not None and self.still_s.get(rank, 0.0) >= most_s + grace_s
        }  # fmt: skip


def stall_limit_s(settings: RunSettings, label: str) -> float | None:
    """For how long progress in a phase may stand still, by the phase's label; None: without limit."""
    if label not in {Phase.TRAIN_ROLLOUT.label, Phase.EVAL_ROLLOUT.label}:
        return settings.trainer.stall_timeout_s
    rollout = settings.rollout
    limit_s = rollout.group_timeout_s if rollout.stall_timeout_s is None else rollout.stall_timeout_s
    return limit_s + STARTS * settings.engine.start_timeout_s
