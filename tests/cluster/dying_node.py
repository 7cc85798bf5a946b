"""A node that is hit by a signal at an exact place of its first iteration, without any help from the product:

    python -m tests.cluster.dying_node PHASE before|after KILL|STOP ARGUMENTS OF run
    python -m tests.cluster.dying_node each both COLLECTOR ARGUMENTS OF run

The second one kills the node's collector at all these places, one after the other.

`before` is the moment at which the row's flag is about to be raised, its work done, and `after` the moment at
which the flag has just been raised. A worker raises none in a row that is the master's alone: there `before`
is the moment at which it begins to wait for the master's flag, and `after` the one at which it has read it.
"""

import os
import signal
import sys
from collections.abc import Callable

from coordinator import cli
from coordinator.collector.host import CollectorHost
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from coordinator.journal.events import Say
from coordinator.machine.children import Children
from coordinator.node.flags import Flags, Payload
from coordinator.protocol.phase import Phase

ITERATION = 1
"""The iteration in which the node is hit."""


Hit = Callable[[int, str], None]
"""Is called at each place of ITERATION: the row, and `before` or `after` its flag."""


def hit_at_each(hit: Hit) -> None:
    """Have the node of this process call `hit` at each place."""
    raise_flag, wait_for_master = Flags.raise_flag, Flags.wait_master

    def raise_or_die(self: Flags, flag: Flag, payload: Payload) -> None:
        is_hit = flag.iteration == ITERATION and flag.is_done
        if is_hit:
            hit(flag.phase, "before")
        raise_flag(self, flag, payload)
        if is_hit:
            hit(flag.phase, "after")

    def wait_or_die(self: Flags, iteration: int, phase: Phase) -> Payload:
        raised = {(flag.iteration, flag.phase) for flag in self._raised}
        is_hit = iteration == ITERATION and (iteration, phase) not in raised
        if is_hit:
            hit(phase, "before")
        document = wait_for_master(self, iteration, phase)
        if is_hit:
            hit(phase, "after")
        return document

    Flags.raise_flag, Flags.wait_master = raise_or_die, wait_or_die


def hit_at(place: Phase, when: str, number: int) -> None:
    """Have the node of this process get a signal there."""

    def hit(phase: int, moment: str) -> None:
        if (phase, moment) == (place, when):
            os.kill(os.getpid(), number)

    hit_at_each(hit)


def hit_collectors() -> None:
    """Have the collector of this process's node killed at each place. One is started where none lives."""
    hosts: list[CollectorHost] = []
    make = CollectorHost.__init__

    def remember(self: CollectorHost, children: Children, run_dir: RunDir, rank: int, say: Say) -> None:
        make(self, children, run_dir, rank, say)
        hosts.append(self)

    def hit(phase: int, moment: str) -> None:
        (host,) = hosts
        host.start()
        assert host._child is not None
        host._child.kill_now()
        host._child.wait(60.0)
        print(f"collector killed {moment} the flag of row {phase:d}.", flush=True)

    CollectorHost.__init__ = remember
    hit_at_each(hit)


if __name__ == "__main__":
    _, phase, when, name, *arguments = sys.argv
    sys.argv[1:] = arguments
    if name == "COLLECTOR":
        hit_collectors()
    else:
        hit_at(Phase[phase.upper()], when, signal.Signals[f"SIG{name}"])
    sys.exit(cli.main())
