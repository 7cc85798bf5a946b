"""The time for which a rank that is lost again and again stays out, where the others go on without it.

Each time that a rank is let in or lost a new epoch begins, which ends the training of all nodes. So a process
that a supervisor starts again and again, and that fails each time, would hold up everybody.
"""

from collections import Counter
from collections.abc import Iterable

FREE = 1
"""Losses that cost a rank no waiting."""


class BackOff:
    """Counts for each rank how often it was lost before it finished an iteration. Moments are monotonic."""

    def __init__(self) -> None:
        self._losses: Counter[int] = Counter()
        self._until_s: dict[int, float] = {}

    def lose(self, rank: int, now_s: float, first_s: float, most_s: float) -> float:
        """Take in that `rank` is lost; returns for how many seconds it is out: `first_s`, then twice as long
        each time, and `most_s` at most.
        """
        self._losses[rank] += 1
        further = self._losses[rank] - FREE
        pause_s = min(first_s * 2.0 ** min(further - 1, 60), most_s) if further > 0 else 0.0
        self._until_s[rank] = now_s + pause_s
        return pause_s

    def is_out(self, rank: int, now_s: float) -> bool:
        """Return whether `rank` has to wait still."""
        return now_s < self._until_s.get(rank, now_s)

    def losses(self, rank: int) -> int:
        """Return how often `rank` was lost since it finished an iteration."""
        return self._losses[rank]

    def settle(self, ranks: Iterable[int]) -> None:
        """Take in that `ranks` have finished an iteration."""
        for rank in ranks:
            self._losses.pop(rank, None)
            self._until_s.pop(rank, None)
