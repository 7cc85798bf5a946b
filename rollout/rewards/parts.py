"""The setting `rollout.reward` as the rewards that it adds up: `math=1 + length=-0.1`; and with those of
sources, `rollout.rewards`: `exact | source=math: math=1 + length=-0.1`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.settings import BESIDE, JOIN

_PARAMETER = re.compile(r"[,?&][A-Za-z_][\w.-]*$")
"""How a text ends whose next `=` gives a parameter its value, and no weight: `judge:URL,model`."""


@dataclass(frozen=True)
class Part:
    """One of the rewards that a setting names."""

    name: str
    weight: float | None
    """None: none was given, which counts as 1 beside other rewards."""


class RewardsOfSources(NamedTuple):
    """The rewards that a text names by the source of a task."""

    general: str
    """That of tasks whose source has none of its own."""
    field: str
    """The field of a task that names its source; empty if no source has a reward of its own."""
    by_source: dict[str, str]

    def of_task(self, task: Mapping[str, Any]) -> str:
        """Return the text of a task's reward."""
        return self.by_source.get(str(task.get(self.field)), self.general)

    def all(self) -> list[str]:
        """Return the texts of all rewards."""
        return [self.general, *self.by_source.values()]


def rewards_of_sources(text: str) -> RewardsOfSources:
    """Take RolloutSettings.scoring apart."""
    general, *named_rewards = text.split(BESIDE)
    field, by_source = "", dict[str, str]()
    for named_reward in named_rewards:
        place, _, reward = named_reward.partition(": ")
        field, _, source = place.partition("=")
        by_source[source] = reward
    return RewardsOfSources(general, field, by_source)


def parts_of(text: str) -> list[Part]:
    """Return the rewards that `NAME=WEIGHT + NAME=WEIGHT` names. Raises ValueError, which names the part, for
    a weight that is no finite number, and for a name that is missing or there twice.
    """
    parts = [_part(part.strip()) for part in text.split(JOIN)]
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice; add up its weights, and give it once")
    return parts


def _part(text: str) -> Part:
    name, sign, number = text.rpartition("=")
    if not sign or _PARAMETER.search(name):
        name, number = text, None
    if not name:
        raise ValueError(f"{text!r} names no reward; write NAME or NAME=WEIGHT, e.g. math=1")
    if number is None:
        return Part(name, None)
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"the weight {number!r} of {name} is not a finite number; write e.g. {name}=0.5")
    return Part(name, weight)


def parameters_of(
    pairs: Sequence[str], known: Mapping[str, Callable[[str], Any]], at_least: Mapping[str, float]
) -> dict[str, Any]:
    """Return the parameters of a reward by name, from texts `NAME=VALUE`. `known` makes each value of its
    text. Raises ValueError for another name, no value, no number, one that is infinite or below `at_least`.
    """
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise ValueError(f"no parameter {key!r}; there is {', '.join(known)}")
        try:
            parameters[key] = known[key](value)
        except ValueError:
            raise ValueError(f"{key}={value}: give a number") from None
        if parameters[key] == "" or (key in at_least and not at_least[key] <= parameters[key] < math.inf):
            least = f" of {at_least[key]:g} or more" if key in at_least else ""
            raise ValueError(f"{key}={value}: give a value{least}")
    return parameters
