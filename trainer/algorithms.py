"""The named algorithms: each is a choice of the settings of the loss. Torch-free.

A preset is a function that returns settings of `trainer` by name; settings that are given themselves win.
"""

from collections.abc import Callable
from typing import Any


def default() -> dict[str, Any]:
    """What we would start with: A = r - mean (Dr.GRPO), clip 0.2 / 0.28 and token mean (DAPO), no KL, flat
    groups left out, truncated correction for the engine.
    """
    return {}


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {"default": default}
