"""Show how long three unequal nodes take for a rollout whose groups they claim, against the ideal.

    python scripts/bench/balance.py [--seeds 20] [--groups 192] [--speeds 4,2,1] [--at-once 4] [--dir DIR]

The engines are simulated: each node generates `--at-once` groups at the same time, each at the node's speed.
Seconds are lognormal (sigma 1) and belong to the tasks; an iteration has all tasks. What decides is the
product's: the chunks, who claims which, the claims themselves, as files in a directory (--dir: on another
filesystem), and what an iteration teaches the next. In the first iteration neither costs nor speeds are
known, from the second on both are; of a node that is new its speed is not. Tokens are in proportion to the
seconds, or, where groups wait for tools, two of each group. The ideal: all nodes busy to the end, or the
longest group on the fastest node. A rate that halves does so at half of the ideal time; then the ideal is
that of the new rates.

Prints for each way the median and the worst ratio to the ideal, the most claims of a rollout, and the mean
operations on the directory of a claim, with those of nodes that leave chunks to others.
"""

import argparse
import heapq
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from coordinator.directory.claims import Claims
from coordinator.directory.layout import RunDir
from coordinator.protocol.chunks import (
    Chunk,
    Chunks,
    Pace,
    RankLoad,
    RankTimings,
    choose_chunks,
    cut_into_chunks,
    measured,
)
from coordinator.protocol.split_slots import split_slots
from rollout.storage import files

LOOK_S = 0.02
"""How often a simulated node that leaves a chunk to others looks again, as a fraction of the ideal."""


@dataclass
class SimulatedNode:
    """A node with its engine."""

    rank: int
    speed: float
    queue: deque[int] = field(default_factory=deque[int])
    in_flight: int = 0
    open_work: float = 0.0
    done_work: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def pace(self) -> float | None:
        return self.done_work / sum(self.seconds.values()) if self.seconds else None


@dataclass
class Rollout:
    """One rollout, event by event."""

    seconds: Sequence[float]
    """Seconds of each group on a node of speed 1."""
    speeds: Sequence[float]
    at_once: int
    ideal_s: float
    halves: int | None = None
    """The rank whose speed halves at half of the ideal time."""
    claimed: int = 0

    def __post_init__(self) -> None:
        self.nodes = {rank: SimulatedNode(rank, speed) for rank, speed in enumerate(self.speeds)}
        self._numbers = count()
        self._events: list[tuple[float, int, int, int | None, float]] = []
        self._still_since_s = 0.0

    def by_shares(self, weights: Mapping[int, float]) -> float:
        """Return the seconds of a split that is fixed beforehand."""
        for rank, slots in split_slots(range(len(self.seconds)), weights).items():
            self.nodes[rank].queue.extend(slots)
        return self._run(None, {})

    def by_claims(self, chunks: Chunks, claims: Mapping[int, Claims]) -> float:
        """Return the seconds of a rollout whose groups are claimed."""
        self._costs = chunks.costs()
        return self._run(chunks, claims)

    def made(self) -> dict[int, RankTimings]:
        """Return the Made of each node."""
        return {rank: RankTimings(node.seconds, self.at_once) for rank, node in self.nodes.items()}

    def _run(self, chunks: Chunks | None, claims: Mapping[int, Claims]) -> float:
        for rank in range(len(self.speeds)):
            self._at(0.0, rank, None)
        if self.halves is not None:
            self._at(self.ideal_s / 2, self.halves, -1)
        end_s = 0.0
        while self._events:
            now_s, _, rank, slot, begun_s = heapq.heappop(self._events)
            node = self.nodes[rank]
            if slot == -1:
                self._halve(node, now_s)
                continue
            if slot is not None:
                node.in_flight -= 1
                node.seconds[slot] = now_s - begun_s
                if chunks:
                    node.done_work += self._costs[slot]
                    node.open_work -= self._costs[slot]
                end_s = now_s
            while node.in_flight < self.at_once:
                if (
                    not node.queue
                    and chunks is not None
                    and not self._claim(node, now_s, chunks, claims[rank])
                ):
                    break
                if not node.queue:
                    break
                begun = node.queue.popleft()
                node.in_flight += 1
                self._at(now_s + self.seconds[begun] / node.speed, rank, begun, now_s)
        return end_s

    def _claim(self, node: SimulatedNode, now_s: float, chunks: Chunks, claims: Claims) -> bool:
        shown, each = claims.look(), len(chunks.chunks)
        numbers = {chunk: shown.number(chunk, each) for chunk in range(each)}
        free = {chunk: number for chunk, number in numbers.items() if number not in shown.claimed}
        me = RankLoad(node.open_work, node.pace, now_s - self._still_since_s, self.at_once)
        wanted = choose_chunks(chunks, node.rank, list(free), me)
        number = claims.take([free[chunk] for chunk in wanted]) if wanted else None
        if number is None:
            if free:
                self._at(now_s + LOOK_S * self.ideal_s, node.rank, None)
            return False
        self.claimed += 1
        self._still_since_s = now_s
        self.give(node, number, chunks.chunks[number % each])
        return True

    def give(self, node: SimulatedNode, _number: int, chunk: Chunk) -> None:
        """Let a node have the slots of a chunk that it has claimed."""
        node.queue.extend(chunk.slots)
        node.open_work += chunk.work

    def _at(self, when_s: float, rank: int, slot: int | None, begun_s: float = 0.0) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), rank, slot, begun_s))

    def _halve(self, node: SimulatedNode, now_s: float) -> None:
        """Let all that the node has in flight take twice as long from now on."""
        node.speed /= 2
        self._events = [
            (now_s + 2 * (when_s - now_s), number, rank, slot, begun_s)
            if rank == node.rank and slot is not None
            else (when_s, number, rank, slot, begun_s)
            for when_s, number, rank, slot, begun_s in self._events
        ]
        heapq.heapify(self._events)


def ideal_s(
    seconds: Sequence[float], speeds: Sequence[float], at_once: int, halves: int | None = None
) -> float:
    """Return the least time: all busy to the end, or the longest group on the fastest node."""
    work, rate = sum(seconds), sum(speeds) * at_once
    least_s = work / rate
    if halves is not None:
        before_s = max(least_s, max(seconds) / max(speeds)) / 2
        slower = rate - speeds[halves] * at_once / 2
        least_s = before_s + max(0.0, work - rate * before_s) / slower
    return max(least_s, max(seconds) / max(speeds))


@dataclass
class Found:
    """What one way of splitting has come to, of all seeds."""

    ratios: list[float] = field(default_factory=list[float])
    claims: list[int] = field(default_factory=list[int])
    operations: list[float] = field(default_factory=list[float])


@dataclass
class Run:
    """Iterations of the same tasks, and what they have taught so far."""

    run_dir: RunDir
    seconds: Sequence[float]
    tokens: Mapping[int, int]
    speeds: Sequence[float]
    at_once: int
    costs: dict[int, float] = field(default_factory=dict[int, float])
    paces: dict[int, Pace] = field(default_factory=dict[int, Pace])
    number: int = 0

    def iterate(self, new_tasks: bool = False, halves: int | None = None, new: int | None = None) -> Found:
        """Make a rollout by claims; `new`: a rank whose speed is not known."""
        self.number += 1
        ranks = range(len(self.speeds))
        rollout = Rollout(
            self.seconds, self.speeds, self.at_once, ideal_s(self.seconds, self.speeds, self.at_once), halves
        )
        costs = self.costs
        if new_tasks and costs:
            costs = dict.fromkeys(costs, statistics.mean(costs.values()))
        paces = {rank: pace for rank, pace in self.paces.items() if rank != new}
        chunks = cut_into_chunks(range(len(self.seconds)), costs, ranks, paces)
        files.operations.clear()
        claims = {rank: Claims(self.run_dir, 1, self.number, 2, rank) for rank in ranks}
        ratio = rollout.by_claims(chunks, claims) / ideal_s(self.seconds, self.speeds, self.at_once, halves)
        if halves is None and new is None:
            self.costs, self.paces = measured(rollout.made(), self.tokens, {} if new_tasks else self.costs)
        return Found([ratio], [rollout.claimed], [sum(files.operations.values()) / rollout.claimed])


def measure(
    seconds: Sequence[float], speeds: Sequence[float], at_once: int, run_dir: Callable[[], RunDir]
) -> dict[str, Found]:
    """Return the Found of each way, for the seconds of one seed."""
    tools = Run(run_dir(), seconds, dict.fromkeys(range(len(seconds)), 2), speeds, at_once)
    found = {f"tools, iteration {number}": tools.iterate() for number in (1, 2, 3)}
    tokens = {slot: round(1000 * s) for slot, s in enumerate(seconds)}
    engine = Run(run_dir(), seconds, tokens, speeds, at_once)
    found |= {f"claims, iteration {number}": engine.iterate() for number in (1, 2)}
    for rank, speed in enumerate(speeds):
        found[f"claims, the rate of {speed:g} halves"] = engine.iterate(halves=rank)
        found[f"claims, the node of {speed:g} is new"] = engine.iterate(new=rank)
    found["claims, new tasks, known rates"] = engine.iterate(new_tasks=True)
    for name, weights in (("equal weights", [1.0] * len(speeds)), ("right static weights", speeds)):
        best_s = ideal_s(seconds, speeds, at_once)
        fixed = Rollout(seconds, speeds, at_once, best_s)
        found[name] = Found([fixed.by_shares(dict(enumerate(weights))) / best_s])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--groups", type=int, default=192)
    parser.add_argument("--speeds", default="4,2,1")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    speeds = [float(speed) for speed in options.speeds.split(",")]
    table: dict[str, Found] = {}
    for seed in range(options.seeds):
        draw = random.Random(seed)
        seconds = [draw.lognormvariate(0.0, 1.0) for _ in range(options.groups)]
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:

            def run_dir(directory: str = directory) -> RunDir:
                made = RunDir(Path(tempfile.mkdtemp(dir=directory)))
                files.make_directory(made.claims)
                return made

            for name, found in measure(seconds, speeds, options.at_once, run_dir).items():
                row = table.setdefault(name, Found())
                row.ratios += found.ratios
                row.claims += found.claims
                row.operations += found.operations
    print(f"{'':34} median  worst  claims  operations a claim")
    for name, row in table.items():
        figures = f"{statistics.median(row.ratios):6.3f} {max(row.ratios):6.3f}"
        claimed = f"  {max(row.claims):6}  {statistics.mean(row.operations):6.2f}" if row.claims else ""
        print(f"{name:34} {figures}{claimed}")


if __name__ == "__main__":
    main()
