"""What a machine does with its nodes: real processes in place of the nodes."""

import sys

from coordinator.commands import machine
from coordinator.commands.interrupts import Interrupts
from coordinator.machine.children import Child, Children
from coordinator.placement import Crew
from coordinator.protocol.exits import Exit

REFUSED = f"raise SystemExit({int(Exit.USAGE)})"
COUNTS = """
import signal, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(1.0)
raise SystemExit(100 + len(received))
"""


def test_node_whose_neighbour_may_not_start_is_told_once_and_ends_in_order() -> None:
    with Children() as children:

        def start(crew: Crew) -> Child:
            if crew == "rollout":
                child = children.start(crew, [sys.executable, "-c", COUNTS])
                while "ready" not in child.tail():
                    pass
                return child
            return children.start(crew, [sys.executable, "-c", REFUSED])

        assert machine._follow(start, ["rollout", "train"], Interrupts()) == [101, Exit.USAGE]
