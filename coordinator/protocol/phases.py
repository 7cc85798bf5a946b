"""The 14 rows of the protocol table, and what is known of each: stated here once."""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Literal

from coordinator.settings.tree import RunKind

Category = Literal["rollout", "load", "train", "save", "other"]
"""What a row's time is counted as in the report."""


class By(StrEnum):
    """Who acts in a row."""

    MASTER = "master"
    ALL = "all nodes"


_EVERY: frozenset[RunKind] = frozenset({"both", "rollout", "update", "eval"})
_TRAIN_ROLLOUT: frozenset[RunKind] = frozenset({"both", "rollout"})
_ANY_ROLLOUT: frozenset[RunKind] = frozenset({"both", "rollout", "eval"})
_UPDATE: frozenset[RunKind] = frozenset({"both", "update"})


class Phase(IntEnum):
    """A row of the protocol table, in order. A row is over when the master's flag for it is up."""

    # fmt: off
    ITERATION_START   = 0,  By.MASTER, _EVERY,         "other"
    TRAIN_PLAN        = 1,  By.MASTER, _TRAIN_ROLLOUT, "rollout"
    TRAIN_ROLLOUT     = 2,  By.ALL,    _TRAIN_ROLLOUT, "rollout"
    TRAIN_FILES_READY = 3,  By.ALL,    _TRAIN_ROLLOUT, "rollout"
    TRAIN_AGGREGATE   = 4,  By.MASTER, _TRAIN_ROLLOUT, "rollout"
    EVAL_DECISION     = 5,  By.MASTER, _ANY_ROLLOUT,   "rollout"
    EVAL_ROLLOUT      = 6,  By.ALL,    _ANY_ROLLOUT,   "rollout"
    ENGINE_STOPPED    = 7,  By.ALL,    _UPDATE,        "load"
    TRAIN_DATA        = 8,  By.MASTER, _UPDATE,        "train"
    TRAIN_CONFIG      = 9,  By.MASTER, _UPDATE,        "train"
    TRAINING          = 10, By.ALL,    _UPDATE,        "train"
    CHECKPOINT        = 11, By.MASTER, _UPDATE,        "save"
    ENGINE_RESTARTED  = 12, By.ALL,    _UPDATE,        "load"
    ITERATION_END     = 13, By.ALL,    _EVERY,         "other"
    # fmt: on

    by: By
    kinds: frozenset[RunKind]
    """The kinds of run in which the row takes part."""
    category: Category

    def __new__(cls, number: int, by: By, kinds: frozenset[RunKind], category: Category) -> "Phase":
        phase = int.__new__(cls, number)
        phase._value_ = number
        phase.by, phase.kinds, phase.category = by, kinds, category
        return phase

    @property
    def label(self) -> str:
        """The name as users read it: train_rollout."""
        return self.name.lower()


def rows_of(kind: RunKind) -> frozenset[Phase]:
    """Return the rows of a kind of run: all, or 0-6 and 13 (eval: without 1-4), or 0 and 7-13."""
    return frozenset(phase for phase in Phase if kind in phase.kinds)


def spent_s(rows: Mapping[str, float], idle: Mapping[str, float]) -> float:
    """Return the seconds of an iteration that were no interruption, on the master that wrote its line.

    `rows` and `idle`: `phase_seconds` and `idle_seconds` of the metrics line. With two crews (`idle` is not
    empty) the rows of the other crew stand there too, which go on at the same time.
    """
    if not idle:
        return sum(rows.values())
    update_rows = {phase.label for phase in rows_of("update")}
    return sum(seconds for name, seconds in rows.items() if name in update_rows) + idle.get("train", 0.0)
