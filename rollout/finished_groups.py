"""The groups that a collector has finished, and that are not all handed over at once."""

import logging
from collections.abc import Callable

from rollout.tally import amount
from rollout.trajectory import Group

log = logging.getLogger(__name__)


class FinishedGroups:
    """Counts the groups that have ended, and holds those that are not handed over yet. Tombstones are final,
    so they wait for a group that shows that the reward works.
    """

    def __init__(self, counts: Callable[[Group], bool]) -> None:
        """`counts` says whether a group counts as one of the needed groups."""
        self._counts = counts
        self.to_hand_over: list[Group] = []
        self.counted = 0
        """How many count, since `begin`."""
        self._made = self._given_up = self._lost_samples = 0

    def begin(self) -> None:
        """Begin to count for another collection: what is held is a part of it."""
        self.counted = sum(map(self._counts, self.to_hand_over))

    def add(self, group: Group) -> None:
        """Take in a group that has ended."""
        self.counted += self._counts(group)
        self.to_hand_over.append(group)
        self._tell(group, 1)

    def forget(self, group: Group) -> None:
        """Leave out a group that is held: nobody needs it any more."""
        self.to_hand_over.remove(group)
        self._tell(group, -1)

    def _tell(self, group: Group, times: int) -> None:
        self._made += times * (group.given_up is None)
        self._given_up += times * (group.given_up is not None)
        self._lost_samples += times * len(group.failed)

    def hand_over(self, on_group: Callable[[Group], None], *, may_all_fail: bool = False) -> None:
        """Hand over what is held, each group once; nothing while all were given up, unless that may be."""
        while self.to_hand_over and (self._made or may_all_fail):
            on_group(self.to_hand_over.pop(0))

    def say_losses(self) -> None:
        """Log how many groups were given up, and how many samples were lost, if any."""
        if self._given_up or self._lost_samples:
            log.warning(
                "%d of %s %s given up, %s lost (unfit, or without a reward)",
                self._given_up,
                amount(self._made + self._given_up, "groups"),
                "was" if self._given_up == 1 else "were",
                amount(self._lost_samples, "samples", "were"),
            )
