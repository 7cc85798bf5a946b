"""The request of a start: what was typed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER
from coordinator.settings.placement import Crew


@dataclass(frozen=True)
class StartRequest:
    """The request to start a machine's part in a run, as it was typed."""

    root: Path
    """The run directory, absolute."""
    rank: int = MASTER
    """Rank of this machine among all."""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings that were given, by dotted name."""
    guest: str = ""
    """The name that a guest was given; empty: it takes the machine's."""
    reset: Sequence[str] = ()
    """Settings, and sections of them, that the master does not keep from the last start."""
    accept_code_change: bool = False
    """Whether the master may go on with an iteration although the code of its reward or environment has
    changed.
    """
    allow_shared_dir: bool = False
    """Whether other users may own the run directory, or write in it."""
    crew: Crew = "main"
    placed_as: str | None = None
    """The placement that `crew` is of, as JSON; None: the one that holds."""
