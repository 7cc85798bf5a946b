"""One process of each test process that has imported what engines and trainers import, to be forked.

It saves each of them the 5 s of CPU that its own imports take. It ends with this process.
"""

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache

from coordinator.machine.children import FORKS, Children
from trainer.job import forks


@cache
def _children() -> Children:
    children = Children()
    (children.spool / "groups").mkdir()
    atexit.register(children.close)
    return children


@cache
def shared_imports() -> Mapping[str, str]:
    """Start that process, at the first call. Return what makes a node use it if its environment has it:
    nothing where nothing can be forked.
    """
    shared = _children().share_imports()
    deadline_s = time.monotonic() + 60.0
    # In the moment of its exec a process has no words, by which a cluster of the tests knows it for older.
    while shared and not os.path.exists(shared[FORKS]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return shared


def forked(argv: Sequence[str]) -> list[str]:
    """Return the command of a client that stands for an engine, if it can be a fork; else its own."""
    if not forks.is_program(argv) or not (shared := shared_imports()):
        return [*argv]
    return forks.client(shared[FORKS], str(_children().spool / "groups"), argv)
