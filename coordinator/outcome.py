"""How a node ends, and what sends it to another epoch: exceptions, since they end whatever it does."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `run`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    LOST = 3
    SUPERSEDED = 4
    INTERRUPTED = 130


class Ended(Exception):
    """This node ends: the exit code, a text for the person, and the flag that tells the others."""

    def __init__(self, code: Exit, text: str, tell: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.tell = tell


class NodeLost(Exception):
    """The master has lost a node that it holds for, or goes on without; the text says who, and the repair."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class EpochChanged(Exception):
    """A newer epoch is to be entered: whatever this node does for the old one is over."""


class TrainerFailed(Exception):
    """The training job failed or was ended on this node; the text holds the tail of its log."""
