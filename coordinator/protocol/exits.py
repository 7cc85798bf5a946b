"""Exceptions that end a node, or send it to another epoch: these end whatever the node does."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `run`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    LOST = 3
    SUPERSEDED = 4
    MOVED = 5
    """Exit code for the process that starts a node: devices are placed anew, so it has another crew now."""
    INTERRUPTED = 130


OUTCOMES: dict[int, str] = {Exit.DONE: "finished", Exit.LOST: "lost", Exit.INTERRUPTED: "stopped"}
"""How a run has ended, by the exit code of `run`; every other code: failed."""


class PhaseEnded(Exception):
    """The present phase is over; what comes next depends on the kind of exception."""


class NodeEnded(PhaseEnded):
    """This node ends: the exit code, a text for the person, and the flag that tells the others."""

    def __init__(self, code: Exit, text: str, tell: str | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.tell = tell


class NodeLost(PhaseEnded):
    """The master has lost a node that it holds for, or goes on without; the text says who, and the repair."""

    def __init__(self, rank: int, text: str, stalled: bool = False, ended: bool = False) -> None:
        super().__init__(text)
        self.rank = rank
        self.stalled = stalled
        """Whether it still beats: then it has to come back as another incarnation."""
        self.ended = ended
        """Whether its process has ended, or is about to: another one will come, if any."""


class Fenced(PhaseEnded):
    """This node was without the shared directory for too long: it must leave its epoch, and come back."""


class EpochChanged(PhaseEnded):
    """A newer epoch is to be entered: all that this node does for the old one is over."""


class TrainerFailed(PhaseEnded):
    """The training job failed or was ended on this node; the text holds the tail of its log."""

    def __init__(self, text: str, comes_again: bool = False) -> None:
        super().__init__(text)
        self.comes_again = comes_again
        """Whether another attempt would fail in the same way."""
