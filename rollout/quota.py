"""How many groups an iteration needs, and which count. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rollout.settings import RolloutSettings

if TYPE_CHECKING:  # `run status` reads quotas, and does without numpy
    from rollout.trajectory import Group


@dataclass(frozen=True)
class Quota:
    """`needed` groups out of `slots` slots; fixed when the iteration is opened.

    Without spare slots every slot counts, given up or not. With them one that is given up is replaced; with
    `replace_flat` (dynamic sampling, DAPO, arXiv 2503.14476) also one whose rewards are all the same, which
    would teach nothing.
    """

    needed: int
    slots: int
    replace_flat: bool = False

    @classmethod
    def of(cls, settings: RolloutSettings) -> Self:
        """Of a new iteration of training."""
        factor = max(settings.over_sample, settings.dynamic_limit if settings.dynamic_sampling else 1.0)
        needed = settings.tasks_per_iteration
        return cls(needed, math.ceil(needed * factor), settings.dynamic_sampling)

    def counts(self, group: "Group") -> bool:
        """Whether a finished group is one of those that are needed."""
        if self.slots == self.needed:
            return True
        return group.given_up is None and not (self.replace_flat and is_flat(group))

    def missing(self, finished: "Iterable[Group]") -> int:
        """How many groups are still needed."""
        return max(0, self.needed - sum(map(self.counts, finished)))


def is_flat(group: "Group") -> bool:
    """Whether all samples have the same reward: no advantage, nothing to learn."""
    return len({sample.reward for sample in group.samples}) < 2
