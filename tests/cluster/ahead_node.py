"""A node that is killed in its head start, without any help from the product:

    python -m tests.cluster.ahead_node ITERATION first|last ARGUMENTS OF run

`first` is the moment at which a group of the iteration after ITERATION has been finished ahead, as a rule
while the checkpoint is being written; `last` that at which the checkpoint is durable and has no name yet.
"""

import os
import signal
import sys
from collections.abc import Callable

from coordinator import cli
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import collecting
from coordinator.phases.node_share import Share


def killed_in(iteration: int, when: str) -> Callable[..., None]:
    """Return what takes the place of collecting.begin_share."""
    real = collecting.begin_share

    def begin(node: Node, following: Iteration, share: Share, is_over: Callable[[], bool]) -> None:
        is_here = following.number == iteration + 1
        steps = node.position.describe()["steps"]

        def is_over_or_die() -> bool:
            if is_here and when == "first" and node.position.describe()["steps"] > steps:
                os.kill(os.getpid(), signal.SIGKILL)
            is_done = is_over()
            return is_done and not (is_here and when == "first")  # a busy machine may be slow to finish one

        real(node, following, share, is_over_or_die)
        if is_here and when == "last":
            os.kill(os.getpid(), signal.SIGKILL)

    return begin


if __name__ == "__main__":
    _, iteration, when, *arguments = sys.argv
    sys.argv[1:] = arguments
    collecting.begin_share = killed_in(int(iteration), when)
    sys.exit(cli.main())
