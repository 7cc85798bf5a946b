"""What the protocol costs with many nodes: calls on the directory, counted where they are made, and time.

The phases are empty, and each call on the directory takes as long as it is told to.
"""

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coordinator import main
from coordinator.node.node import Node
from coordinator.phases import table
from coordinator.phases.table import run_iteration
from coordinator.protocol.phase import Phase
from rollout.storage import files
from scripts.bench.protocol import run_empty_phase
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.world import NodeProcess, World

T = TypeVar("T")
R = TypeVar("R")

ITERATIONS = 3
"""The first does not count: caches fill, and the nodes do not begin it together."""
HOLD_S = 60.0
"""How long one worker lets all the others wait, after the last iteration."""
SETTLED_S = 20.0
"""After so long the pauses of who waits do not grow any more."""


@dataclass(frozen=True)
class Figures:
    """What a run has cost."""

    nodes: int
    start_s: float
    """From the start of all until the first iteration is open."""
    phase_s: float
    """Simulated seconds of a phase that all nodes pass: the median."""
    longest_phase_s: float
    per_phase_master: float
    per_phase_worker: float
    """Calls on the directory in a row, of the one that makes most."""
    waiting_master: float
    waiting_worker: float
    """Calls a second while all wait for one worker, heartbeats included."""
    waiting_mean: float
    listed_by_worker: int
    """Names in what a worker lists, at most."""
    left: int
    """Names in protocol/ after the run."""


class _Operations:
    """In place of the counter of a process: there are many here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.made: Counter[Process] = Counter()

    def __getitem__(self, _name: str) -> int:
        return 0

    def __setitem__(self, _name: str, count: int) -> None:
        if self._scheduler.current is not None:
            self.made[self._scheduler.process] += count


class _Pool:
    """A ThreadPoolExecutor, with tasks of the scheduler."""

    def __init__(self, scheduler: Scheduler, max_workers: int) -> None:
        self._scheduler = scheduler
        self._workers = max_workers

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
        given, results = list(items), dict[int, R]()

        def work(first: int) -> None:
            for index in range(first, len(given), self._workers):
                results[index] = call(given[index])

        tasks = [
            self._scheduler.spawn(self._scheduler.process, partial(work, n)) for n in range(self._workers)
        ]
        for task in tasks:
            task.done.wait()
        return [results[index] for index in range(len(given))]


class _ManyNodes(World):
    """Nodes that go through empty phases, and then wait for one of them."""

    def __init__(self, root: Path, nodes: int, latency_s: float) -> None:
        settings = {"cluster.rejoin_timeout_s": 600.0, "iterations": None}
        super().__init__(root, nodes, 0, settings)
        self.operations = _Operations(self.scheduler)
        self.latency_s = latency_s
        self.scheduler.stuck_s = 20.0 * nodes
        self.opened_s: list[float] = []
        self.phase_s: list[float] = []
        self.per_phase: Counter[Process] = Counter()
        self.waiting: Counter[Process] = Counter()
        self.listed = 0
        self.patches.append(self._patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        live = main.run_to_exit_code
        patch.setattr(main, "run_to_exit_code", lambda start, prefix: live(start, prefix, self._iterate))
        patch.setattr(files, "operations", self.operations)
        patch.setattr(files, "ThreadPoolExecutor", partial(_Pool, self.scheduler))
        patch.setattr(self.disk, "_latency_s", lambda: self.latency_s)
        patch.setattr(self.disk, "listdir", self._listdir(self.disk.listdir))
        patch.setattr(table, "run_phase", run_empty_phase)

    def _listdir(self, real: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
        def listdir(path: Any) -> list[str]:
            names = real(path)
            node = getattr(self.scheduler.process, "node", None)
            if node is not None and node.rank and node.watch.current is not None:
                self.listed = max(self.listed, len(names))
            return names

        return listdir

    def _iterate(self, node: Node) -> None:
        process, numbers = self.scheduler.process, itertools.count(1)
        for number in range(ITERATIONS):
            began_s, before = self.scheduler.now_s, self.operations.made[process]
            iteration = node.next_iteration(number, lambda _node: next(numbers))
            assert iteration is not None
            run_iteration(node, iteration)
            if node.is_master:
                self.opened_s.append(began_s)
                self.phase_s.append((self.scheduler.now_s - began_s) / len(Phase))
            if number:
                self.per_phase[process] += self.operations.made[process] - before
        self._let_all_wait(node)

    def _let_all_wait(self, node: Node) -> None:
        """Rank 1 is late for one more phase."""
        if node.rank == 1:
            start_s = self.scheduler.now_s
            self.scheduler.at(start_s + SETTLED_S, lambda: self.waiting.subtract(self.operations.made))
            self.scheduler.at(start_s + HOLD_S, lambda: self.waiting.update(self.operations.made))
            self.scheduler.wait(HOLD_S)
        iteration = node.next_iteration(ITERATIONS, lambda _node: ITERATIONS + 1)
        assert iteration is not None
        for phase in (Phase.ITERATION_START, Phase.ENGINE_STOPPED):
            run_empty_phase(node, iteration, phase)


def measure(nodes: int, latency_s: float = 1e-3) -> Figures:
    """Return what empty iterations and a long wait cost `nodes` nodes; a call takes `latency_s`."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="flagpost-", dir=memory if memory.is_dir() else None))
    try:
        world = _ManyNodes(root, nodes, latency_s)
        begun_s = world.scheduler.now_s
        world.run(lambda: True)
        assert world.scheduler.violation is None, world.scheduler.violation
        phases = (ITERATIONS - 1) * len(Phase)
        ranks = {process: process.rank for process in world.processes if isinstance(process, NodeProcess)}
        waited_s = HOLD_S - SETTLED_S

        def most(counts: Counter[Process], unit: float, master: bool) -> float:
            return max(counts[p] for p, rank in ranks.items() if master is (rank == 0) and rank != 1) / unit

        return Figures(
            nodes=nodes,
            start_s=round(world.opened_s[0] - begun_s, 2),
            phase_s=round(sorted(world.phase_s[1:])[0], 4),
            longest_phase_s=round(max(world.phase_s[1:]), 4),
            per_phase_master=round(most(world.per_phase, phases, True), 1),
            per_phase_worker=round(most(world.per_phase, phases, False), 1),
            waiting_master=round(most(world.waiting, waited_s, True), 2),
            waiting_worker=round(most(world.waiting, waited_s, False), 2),
            waiting_mean=round(sum(world.waiting[p] for p in ranks) / len(ranks) / waited_s, 2),
            listed_by_worker=world.listed,
            left=sum(1 for place in world.run_dir.protocol for _ in place.iterdir()),
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    import json
    import sys

    for count in map(int, sys.argv[1:]):
        print(json.dumps(asdict(measure(count))))
