"""Processes of each test process that have imported what a node's children import, to be forked.

They save each of them the 0.3 to 5 s of CPU that its own imports take, and end with this process.
"""

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache

from coordinator.machine import reaper
from coordinator.machine.children import FORKS, PROGRAMS, Children
from trainer.job import forks


@cache
def _children() -> Children:
    children = Children()
    atexit.register(children.close)
    return children


@cache
def _groups() -> str:
    """Make a directory for the groups of forks, which the reaper ends if this process is killed."""
    return str(_children().new_spool("forked") / reaper.PGID_DIR)


@cache
def shared_imports() -> Mapping[str, str]:
    """Start them, at the first call. Return what makes a node use them if its environment has it:
    nothing where nothing can be forked.
    """
    children = _children()
    shared = {**children.share_imports(), **children.share_collectors({"OMP_NUM_THREADS": "1"})}
    deadline_s = time.monotonic() + 60.0
    # In the moment of its exec a process has no words, by which a cluster of the tests knows it for older.
    while not all(map(os.path.exists, shared.values())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return shared


def forked(argv: Sequence[str]) -> list[str]:
    """Return the command of a client that stands for an engine, if it can be a fork; else its own."""
    is_program = forks.is_program(argv, PROGRAMS[FORKS])
    assert is_program or not {*argv} & {*PROGRAMS[FORKS]}, f"nodes type it otherwise: {argv}"
    if not is_program or not (socket := shared_imports().get(FORKS)):
        return [*argv]
    return forks.client(socket, _groups(), argv)
