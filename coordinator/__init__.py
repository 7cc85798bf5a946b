"""Nodes, phases and the shared directory. The only package that writes there; it never imports torch.

`from coordinator import Run` reads a run (`coordinator.run`); it is loaded when it is asked for.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("coordinator.run").Run
