"""A node that is hit by a signal at an exact place of its first iteration, without any help from the product:

    python -m tests.cluster.dying_node PHASE before|after KILL|STOP ARGUMENTS OF run

`before` is the moment at which the row's flag is about to be raised, its work done, and `after` the moment at
which the flag has just been raised. A worker raises none in a row that is the master's alone: there `before`
is the moment at which it begins to wait for the master's flag, and `after` the one at which it has read it.
"""

import os
import signal
import sys
from collections.abc import Callable

from coordinator import cli
from coordinator.directory.layout import Flag
from coordinator.node.flags import Flags, Payload
from coordinator.protocol.phases import Phase

ITERATION = 1
"""The iteration in which the node is hit."""


def hit_at(place: Phase, when: str, hit: Callable[[], None]) -> None:
    """Have the node of this process call `hit` there."""
    raise_flag, wait_for_master = Flags.raise_flag, Flags.wait_master

    def hit_if(now: str, is_there: bool) -> None:
        if is_there and now == when:
            hit()

    def raise_or_die(self: Flags, flag: Flag, payload: Payload) -> None:
        is_there = (flag.iteration, flag.phase) == (ITERATION, place) and flag.is_done
        hit_if("before", is_there)
        raise_flag(self, flag, payload)
        hit_if("after", is_there)

    def wait_or_die(self: Flags, iteration: int, phase: Phase) -> Payload:
        raised = {(flag.iteration, flag.phase) for flag in self._raised}
        is_there = (iteration, phase) == (ITERATION, place) and (iteration, phase) not in raised
        hit_if("before", is_there)
        document = wait_for_master(self, iteration, phase)
        hit_if("after", is_there)
        return document

    Flags.raise_flag, Flags.wait_master = raise_or_die, wait_or_die


if __name__ == "__main__":
    _, phase, when, name, *arguments = sys.argv
    sys.argv[1:] = arguments
    hit_at(Phase[phase.upper()], when, lambda: os.kill(os.getpid(), signal.Signals[f"SIG{name}"]))
    sys.exit(cli.main())
