"""Signals that ask a node to end: they are acted on whatever the main thread holds."""

import signal
import subprocess
import sys

NODE = """
import os, signal, threading, time
from coordinator.machine.signals import Signals
stop, numbers = threading.Event(), []
def interrupt(number):
    numbers.append(number)
    stop.set()
Signals(interrupt).begin()
with stop._cond:  # as the main thread does for a moment in each `stop.wait`
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
assert stop.wait(10)
print(*numbers, flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_signal_is_acted_on_while_the_main_thread_holds_the_lock_and_a_second_one_ends_it() -> None:
    node = subprocess.run([sys.executable, "-c", NODE], capture_output=True, text=True, timeout=30)
    assert (node.stdout, node.returncode) == (f"{signal.SIGTERM}\n", -signal.SIGINT), node.stderr
