"""Signals that ask a node to end: they are acted on whatever the main thread holds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faultfs import FaultFs, unavailable
from tests.processes import is_schedulable

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
assert stop.wait(60)
print(*numbers, flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_signal_is_acted_on_while_the_main_thread_holds_the_lock_and_a_second_one_ends_it(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-c", NODE, str(tmp_path / "signals")]
    node = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (node.stdout, node.returncode) == (f"{signal.SIGTERM}\n", -signal.SIGINT), node.stderr
    assert list((tmp_path / "signals").read_bytes()) == [signal.SIGTERM, signal.SIGINT]


HUNG = """
import os, sys
from pathlib import Path
from coordinator.machine.children import Children
SIGNALS = "signals"
from coordinator.machine.signals import Signals
children = Children()
child = children.start("engine", ["sleep", "1000"])
Signals(lambda number: print("acted on", number, flush=True)).begin(children.spool / SIGNALS)
print(child.pid, children.spool / SIGNALS, flush=True)
sys.stdin.readline()
print("answered", os.listdir(sys.argv[1]), flush=True)
sys.stdin.readline()
"""


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return holds


CASES = {
    "terminated": ([signal.SIGTERM], None),
    "interrupted twice": ([signal.SIGINT, signal.SIGINT], -signal.SIGKILL),
    "killed": ([signal.SIGKILL], -signal.SIGKILL),
}


@pytest.mark.parametrize("case", CASES)
def test_signals_reach_a_node_whose_main_thread_waits_for_a_hung_mount(tmp_path: Path, case: str) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    numbers, code = CASES[case]
    said = tmp_path / "said"
    with FaultFs(tmp_path / "fs", 1) as shared, open(said, "wb") as out:
        argv = [sys.executable, "-c", HUNG, str(shared[0].path)]
        node = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, text=True)
        try:
            assert eventually(lambda: said.read_text().endswith("\n"))
            pid, record = said.read_text().split()
            shared.freeze()
            print(file=node.stdin, flush=True)
            assert eventually(lambda: "request_wait" in Path(f"/proc/{node.pid}/wchan").read_text())
            for number in numbers:
                os.kill(node.pid, number)
                # The kernel keeps only one that nobody has taken.
                acted_on = f"acted on {int(numbers[0])}\n"
                assert number == signal.SIGKILL or eventually(lambda text=acted_on: text in said.read_text())
            if code is None:
                assert list(Path(record).read_bytes()) == numbers and is_schedulable(int(pid))
            else:
                assert eventually(lambda: not is_schedulable(int(pid)))
            # A request that the filesystem has not taken yet dies with the process.
            assert node.poll() is None or numbers == [signal.SIGKILL]
            shared.thaw()
            if code is None:
                assert eventually(lambda: "answered" in said.read_text())
                print(file=node.stdin, flush=True)
            assert node.wait(60) == (code or 0)
            assert eventually(lambda: not is_schedulable(int(pid)))
        finally:
            shared.thaw()
            node.kill()
            node.communicate()


HANGUP = """
import os, signal, sys, time
from pathlib import Path
from coordinator.console.commands.interrupts import Interrupts
from coordinator.machine.signals import Signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
if sys.argv[1] == "node":
    Signals(lambda number: print("ended by", number)).begin(Path(sys.argv[2]))
else:
    interrupts = Interrupts()
os.kill(os.getpid(), signal.SIGHUP)
time.sleep(1.0)
print("lives", signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
"""


@pytest.mark.parametrize("program", ["node", "local"])
def test_a_hangup_that_was_ignored_stays_ignored(tmp_path: Path, program: str) -> None:
    argv = [sys.executable, "-c", HANGUP, program, str(tmp_path / "signals")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout == "lives True\n", done.stderr
