"""What a node knows of the groups that it is making: they may outlive an epoch."""

from typing import Protocol


class InFlight(Protocol):
    """Groups that a node is making."""

    iteration: int
    key: str
    """What they are made with: nodes of two epochs with the same key make the same groups."""

    @property
    def slots(self) -> list[int]:
        """Their slots."""
        ...

    def end(self) -> None:
        """Give them up."""
        ...
