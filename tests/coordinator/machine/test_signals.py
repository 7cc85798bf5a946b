"""Signals that ask a node to end: they are acted on whatever the main thread holds."""

import signal
import subprocess
import sys
from pathlib import Path

NODE = """
import os, signal, sys, threading, time
from pathlib import Path
from coordinator.machine.signals import Signals
stop, numbers = threading.Event(), []
def interrupt(number):
    numbers.append(number)
    stop.set()
Signals(interrupt).begin(Path(sys.argv[1]))
with stop._cond:  # as the main thread does for a moment in each `stop.wait`
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
assert stop.wait(10)
print(*numbers, flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_signal_is_acted_on_while_the_main_thread_holds_the_lock_and_a_second_one_ends_it(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-c", NODE, str(tmp_path / "signals")]
    node = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (node.stdout, node.returncode) == (f"{signal.SIGTERM}\n", -signal.SIGINT), node.stderr
    assert list((tmp_path / "signals").read_bytes()) == [signal.SIGTERM, signal.SIGINT]
