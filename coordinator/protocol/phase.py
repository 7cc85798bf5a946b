"""The 14 phases of an iteration, and what is known of each: stated here once."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Literal

from coordinator.directory.layout import Kind
from coordinator.settings.tree import RunKind

Category = Literal["rollout", "load", "train", "save", "other"]
"""What a phase's time is counted as in the report."""


class ActsIn(StrEnum):
    """Who acts in a phase."""

    MASTER = "master"
    ALL = "all nodes"


_EVERY: frozenset[RunKind] = frozenset({"both", "rollout", "update", "eval"})
_TRAIN_ROLLOUT: frozenset[RunKind] = frozenset({"both", "rollout"})
_ANY_ROLLOUT: frozenset[RunKind] = frozenset({"both", "rollout", "eval"})
_UPDATE: frozenset[RunKind] = frozenset({"both", "update"})


class Phase(IntEnum):
    """A phase of an iteration, in order. It is over when the master's flag for it is up."""

    # fmt: off
    ITERATION_START   = 0,  ActsIn.MASTER, _EVERY,         "other"
    TRAIN_PLAN        = 1,  ActsIn.MASTER, _TRAIN_ROLLOUT, "rollout"
    TRAIN_ROLLOUT     = 2,  ActsIn.ALL,    _TRAIN_ROLLOUT, "rollout"
    TRAIN_FILES_READY = 3,  ActsIn.ALL,    _TRAIN_ROLLOUT, "rollout"
    TRAIN_AGGREGATE   = 4,  ActsIn.MASTER, _TRAIN_ROLLOUT, "rollout"
    EVAL_DECISION     = 5,  ActsIn.MASTER, _ANY_ROLLOUT,   "rollout"
    EVAL_ROLLOUT      = 6,  ActsIn.ALL,    _ANY_ROLLOUT,   "rollout"
    ENGINE_STOPPED    = 7,  ActsIn.ALL,    _UPDATE,        "load"
    TRAIN_DATA        = 8,  ActsIn.MASTER, _UPDATE,        "train"
    TRAIN_CONFIG      = 9,  ActsIn.MASTER, _UPDATE,        "train"
    TRAINING          = 10, ActsIn.ALL,    _UPDATE,        "train"
    CHECKPOINT        = 11, ActsIn.MASTER, _UPDATE,        "save"
    ENGINE_RESTARTED  = 12, ActsIn.ALL,    _UPDATE,        "load"
    ITERATION_END     = 13, ActsIn.ALL,    _EVERY,         "other"
    # fmt: on

    by: ActsIn
    kinds: frozenset[RunKind]
    """The kinds of run in which the phase takes part."""
    category: Category

    def __new__(cls, number: int, by: ActsIn, kinds: frozenset[RunKind], category: Category) -> "Phase":
        phase = int.__new__(cls, number)
        phase._value_ = number
        phase.by, phase.kinds, phase.category = by, kinds, category
        return phase

    @property
    def label(self) -> str:
        """The name as users read it: train_rollout."""
        return self.name.lower()


ROLLOUT_OF: dict[Kind, Phase] = {"train": Phase.TRAIN_ROLLOUT, "eval": Phase.EVAL_ROLLOUT}
"""The phase in which the groups of a kind are made."""


def phases_of(kind: RunKind) -> frozenset[Phase]:
    """Return the phases of a kind of run: all, or 0-6 and 13 (eval: without 1-4), or 0 and 7-13."""
    return frozenset(phase for phase in Phase if kind in phase.kinds)


def spent_s(phases: Mapping[str, float], idle: Mapping[str, float]) -> float:
    """Return the seconds of an iteration that were no interruption, on the master that wrote its line.

    `phases` and `idle`: `phase_seconds` and `idle_seconds` of the metrics line. With two crews (`idle` is not
    empty) the phases of the other crew stand there too, which go on at the same time.
    """
    if not idle:
        return sum(phases.values())
    update_phases = {phase.label for phase in phases_of("update")}
    return sum(seconds for name, seconds in phases.items() if name in update_phases) + idle.get("train", 0.0)
