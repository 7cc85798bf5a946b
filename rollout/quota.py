"""The quota of an iteration: how many groups it needs, and which count. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rollout.settings import RolloutSettings

if TYPE_CHECKING:  # `run status` reads quotas without importing numpy
    from rollout.trajectory import Group


@dataclass(frozen=True)
class Quota:
    """An iteration needs `needed` groups and has `slots` slots. Both are fixed when it is opened.

    Without spare slots every group counts, also one that is given up. With spare slots a group that is given
    up is replaced. With `replace_flat` (dynamic sampling, DAPO, arXiv 2503.14476) a group whose rewards are
    all equal is replaced too: it would teach nothing.
    """

    needed: int
    slots: int
    replace_flat: bool = False

    @classmethod
    def from_settings(cls, settings: RolloutSettings) -> Self:
        """Return the quota of a new iteration of training."""
        factor = max(settings.over_sample, settings.dynamic_limit if settings.dynamic_sampling else 1.0)
        needed = settings.tasks_per_iteration
        return cls(needed, math.ceil(needed * factor), settings.dynamic_sampling)

    def counts(self, group: "Group") -> bool:
        """Return whether a finished group counts as one of the needed groups."""
        if self.slots == self.needed:
            return True
        return group.given_up is None and not (self.replace_flat and is_flat(group))

    def missing(self, finished: "Iterable[Group]") -> int:
        """Return how many groups are still needed."""
        return max(0, self.needed - sum(map(self.counts, finished)))


def is_flat(group: "Group") -> bool:
    """Return whether all samples have the same reward, so that every advantage is 0."""
    return len({sample.reward for sample in group.samples}) < 2
