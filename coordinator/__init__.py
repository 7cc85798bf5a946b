"""Nodes, phases and the shared directory. The only package that knows its layout; it never imports torch.

Beside it only training ranks write there, into directories that they are given; all use `rollout.storage`.

Users import from here: `from coordinator import Run` reads a run, `Server` submits jobs to `run serve`. A
name is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.console.server.client import Server
    from coordinator.console.views.run import Run

__all__ = ["Run", "Server"]

_PLACES = {"Run": "coordinator.console.views.run", "Server": "coordinator.console.server.client"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
