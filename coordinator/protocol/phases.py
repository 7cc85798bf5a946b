"""The 14 rows of the protocol table."""

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """A row of the protocol table, in order. A row is over when the master's flag for it is up."""

    ITERATION_START = 0
    TRAIN_PLAN = 1
    TRAIN_ROLLOUT = 2
    TRAIN_FILES_READY = 3
    TRAIN_AGGREGATE = 4
    EVAL_DECISION = 5
    EVAL_ROLLOUT = 6
    ENGINE_STOPPED = 7
    TRAIN_DATA = 8
    TRAIN_CONFIG = 9
    TRAINING = 10
    CHECKPOINT = 11
    ENGINE_RESTARTED = 12
    ITERATION_END = 13

    @property
    def label(self) -> str:
        """As users read it: train_rollout."""
        return self.name.lower()


class By(StrEnum):
    """Who acts in a row."""

    MASTER = "master"
    ALL = "all nodes"


ROLLOUT_ROWS = frozenset(Phase(row) for row in (0, 1, 2, 3, 4, 5, 6, 13))
EVAL_ROWS = frozenset(Phase(row) for row in (0, 5, 6, 13))
UPDATE_ROWS = frozenset(Phase(row) for row in (0, 7, 8, 9, 10, 11, 12, 13))


def rows_of(rl_phase: str, rollout_split: str | None) -> frozenset[Phase]:
    """The rows that run: both: all, rollout: 0-6 and 13 (eval-only: without 1-4), update: 0 and 7-13."""
    if rl_phase == "update":
        return UPDATE_ROWS
    if rl_phase == "rollout":
        return EVAL_ROWS if rollout_split == "eval-only" else ROLLOUT_ROWS
    return frozenset(Phase)
