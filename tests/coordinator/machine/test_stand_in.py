"""A node whose interpreter is held beats all the same, by its keeper, and ends if it has to."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.layout import Beat, Flag, Record, RunDir, parse_protocol_name
from coordinator.machine import keeper
from coordinator.protocol.heartbeat import read_beat
from coordinator.protocol.snapshot import whole_board
from tests.coordinator.examples import record, run_dir_at

NODE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from coordinator.directory.layout import RunDir
from coordinator.machine.children import Children
from coordinator.machine.pulse import SIGNALS, Pulse
from coordinator.machine.signals import Signals
from coordinator.protocol import heartbeat
from coordinator.protocol.heartbeat import Heart
heartbeat.KEPT_S = 0.0
run_dir, rank, react_s, held_s = RunDir(Path(sys.argv[1])), int(sys.argv[2]), *map(float, sys.argv[3:])
children = Children()
child = children.start("child", ["sleep", "600"])
said = {"done": 7, "host": "here", "phase": "train_rollout", "iteration": 4}
heart = Heart(run_dir, rank, lambda: said)
heart.begin(0, 1)
Signals(lambda number: None).begin(children.spool / SIGNALS)
place = {"root": str(run_dir.root), "crew": "main", "rank": rank, "incarnation": 1}
Pulse(children.spool, lambda: {
    **place, "beat_s": 0.3, "patience_s": 1.0, "react_s": react_s, "pid": os.getpid()
}).begin()
def beats():
    while True:
        heart.beat(2, is_late=True)
        time.sleep(0.3)
threading.Thread(target=beats, daemon=True).start()
time.sleep(0.4 if held_s > 100 else 1.0)  # it may be held before the second pulse
print(os.getpid(), child.pid, flush=True)
sys.stdin.readline()
if held_s > 100:
    sum(range(10**14))  # it does not even look for signals
ctypes.PyDLL(None).sleep(round(held_s))  # as it is called, it holds the interpreter too
print("free", flush=True)
sys.stdin.readline()
"""


class Node:
    """A process that beats, and then holds its interpreter."""

    def __init__(self, run_dir: RunDir, rank: int, react_s: float, held_s: float) -> None:
        self.run_dir, self.rank = run_dir, rank
        argv = [sys.executable, "-c", NODE, str(run_dir.root), str(rank), str(react_s), str(held_s)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.said, self.told = self.process.stdout, self.process.stdin
        self.pid, self.child = map(int, self.said.readline().split())

    def go_on(self) -> None:
        self.told.write("\n")
        self.told.flush()

    def beat(self) -> int:
        """The number of its newest beat; -1 while there is none."""
        beats = whole_board(self.run_dir).beats
        return beats[self.rank].counter if self.rank in beats else -1

    def beats_listed(self) -> list[str]:
        """The names of all its beats."""
        names = os.listdir(self.run_dir.protocol_of(self.rank))
        return [name for name in names if isinstance(parse_protocol_name(name), Beat)]

    def beats_beyond(self, count: int, within_s: float) -> bool:
        """Whether it beats so many times more."""
        first, deadline_s = self.beat(), time.monotonic() + within_s
        while self.beat() < first + count:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    made: list[Node] = []

    def make(react_s: float, held_s: float, rank: int = 1) -> Node:
        run_dir = run_dir_at(tmp_path / "run")
        run_dir.entry(Record(2)).write_text(record(2).model_dump_json())
        made.append(Node(run_dir, rank, react_s, held_s))
        return made[-1]

    yield make
    for node in made:
        node.process.kill()
        node.process.communicate()


def test_node_whose_interpreter_is_held_beats_and_goes_on_above_that(nodes: Any) -> None:
    node: Node = nodes(600, 15)
    node.go_on()
    time.sleep(1.0)  # it stands still, and its pulse has not for long
    assert node.beats_beyond(5, 12.0)
    said: dict[str, Any] = {}
    while not said:  # a beat may be torn, or gone
        said = read_beat(node.run_dir, whole_board(node.run_dir).beats[1])
    assert said["done"] == 7
    assert node.said.readline() == "free\n"
    assert node.beats_beyond(3, 60.0)
    deadline_s = time.monotonic() + 20.0
    while len(node.beats_listed()) > 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(node.beats_listed()) <= 2, "no beat of the stand-in stays"


def test_node_that_is_stopped_has_no_stand_in(nodes: Any) -> None:
    node: Node = nodes(600, 60)
    node.go_on()
    time.sleep(0.7)
    os.kill(node.pid, signal.SIGSTOP)
    time.sleep(0.5)
    assert not node.beats_beyond(1, 3.0)
    os.kill(node.pid, signal.SIGCONT)
    assert node.beats_beyond(2, 10.0)
    os.kill(node.pid, signal.SIGSTOP)
    time.sleep(0.5)
    assert not node.beats_beyond(1, 3.0), "its stand-in has left"


CASES = {
    "interrupted": (0, [signal.SIGINT], None, "stopped"),
    "terminated": (1, [signal.SIGTERM], None, "left"),
    "called": (1, [], Flag(2, 1, 2, 0, "stopped"), "left"),
    "newer process": (1, [], Beat(0, 1, 2, 0), "left"),
}


@pytest.mark.parametrize("why", CASES)
def test_node_that_has_to_end_while_its_interpreter_is_held_is_ended_with_its_children(
    nodes: Any, why: str
) -> None:
    rank, signals, entry, call = CASES[why]
    node: Node = nodes(1, 600, rank)
    node.go_on()
    assert node.beats_beyond(6, 20.0)  # by its stand-in
    if entry is not None:
        node.run_dir.entry(entry).write_text("{}")
    for number in signals:
        os.kill(node.pid, number)
    assert node.process.wait(30) == -signal.SIGKILL
    assert node.process.stderr is not None
    assert (
        f"rank {rank} (here) has to end in train_rollout, iteration 4, but user" in node.process.stderr.read()
    )
    told = node.run_dir.entry(Flag(2, 4, 2, rank, call))
    assert "user code has held its interpreter" in json.loads(told.read_text())["text"]
    deadline_s = time.monotonic() + 10.0
    while keeper.is_schedulable(node.child) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not keeper.is_schedulable(node.child)


def test_second_signal_ends_a_held_node_at_once(nodes: Any) -> None:
    node: Node = nodes(600, 600)
    node.go_on()
    assert node.beats_beyond(4, 20.0)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(node.pid, number)
    assert node.process.wait(20) == -signal.SIGKILL


def test_node_is_not_ended_by_what_is_no_verdict(nodes: Any) -> None:
    node: Node = nodes(1, 600)
    for flag in (Flag(1, 1, 2, 0, "stopped"), Flag(2, 1, 2, 2, "lost")):
        node.run_dir.entry(flag).write_text("{}")
    (node.run_dir.workers / ".nfs0001.r0001.n3.b").write_text("{}")
    node.go_on()
    assert node.beats_beyond(12, 30.0)
    assert node.process.poll() is None
