"""Show how long a rollout takes with guests that come after a quarter of it and go at three quarters.

    python scripts/bench/guests.py [--seeds 20] [--groups 192] [--speeds 4,2] [--guest-speed 2] [--at-once 4]

As scripts/bench/balance.py, whose engines and rollouts these are: two nodes, and guests of which the plan of
the first iteration knows nothing. A guest that leaves finishes what it has in flight, and gives back the rest
of what it has claimed; one that is killed gives back all that has not ended, after `--timeout` of the ideal
time. The ideal: all are busy for as long as they are there, or the longest group on the fastest node.

Prints for each number of guests the median and the worst ratio to the ideal, and how much shorter the rollout
is than without guests.
"""

import argparse
import heapq
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other benchmarks, which are not installed

from coordinator.directory.claims import Claims
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.protocol.chunks import Chunk, Chunks, Pace, cut_into_chunks
from rollout.storage import files
from scripts.bench.balance import Rollout, SimulatedNode

COMES, GOES = 0.25, 0.75
"""Parts of the ideal time after which the guest comes, and goes."""


@dataclass
class Visited(Rollout):
    """A rollout with guests."""

    guests: int = 0
    guest_speed: float = 1.0
    timeout: float = 0.0
    """After so much of the ideal time what a killed guest had claimed is free again; 0: it leaves."""
    gone: set[int] = field(default_factory=set[int])
    numbers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """The chunks that each rank has claimed."""

    def with_guests(self, chunks: Chunks, claims: Mapping[int, Claims]) -> float:
        """Return the seconds of the rollout."""
        self._chunks, self._claims = chunks, claims
        for guest in range(GUESTS, GUESTS + self.guests):
            self.nodes[guest] = SimulatedNode(guest, self.guest_speed)
            self._at(COMES * self.ideal_s, guest, None)
            self._at(GOES * self.ideal_s, guest, -1)
            self._at((GOES + self.timeout) * self.ideal_s, guest, -1)
        return self.by_claims(chunks, claims)

    def give(self, node: SimulatedNode, number: int, chunk: Chunk) -> None:
        """Let a node have what nobody has finished of a chunk."""
        ended = {slot for other in self.nodes.values() for slot in other.seconds}
        left = [slot for slot in chunk.slots if slot not in ended]
        node.queue.extend(left)
        node.open_work += sum(self._costs[slot] for slot in left)
        self.numbers.setdefault(node.rank, []).append(number)

    def _claim(self, node: SimulatedNode, now_s: float, chunks: Chunks, claims: Claims) -> bool:
        return node.rank not in self.gone and super()._claim(node, now_s, chunks, claims)

    def _halve(self, node: SimulatedNode, now_s: float) -> None:
        """Let a guest go, at the first of the events that let a node become slow elsewhere; at the second
        one what it has left is given back.
        """
        if node.rank not in self.gone:
            self.gone.add(node.rank)
            node.queue.clear()
            if self.timeout:  # what it has in flight does not end
                self._events = [
                    event for event in self._events if event[2] != node.rank or event[3] in {-1, None}
                ]
                heapq.heapify(self._events)
            return
        in_flight = {event[3] for event in self._events if event[2] == node.rank}
        each = len(self._chunks.chunks)
        for number in self.numbers.get(node.rank, []):
            if set(self._chunks.chunks[number % each].slots) - node.seconds.keys() - in_flight:
                self._claims[node.rank].give_back(number)
        for rank in range(len(self.speeds)):
            self._at(now_s, rank, None)


def ideal_s(seconds: Sequence[float], speeds: Sequence[float], guests: float, at_once: int) -> float:
    """Return the least time; `guests`: the sum of their speeds."""
    rate = (sum(speeds) + guests * (GOES - COMES)) * at_once
    return max(sum(seconds) / rate, max(seconds) / max(speeds))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--groups", type=int, default=192)
    parser.add_argument("--speeds", default="4,2")
    parser.add_argument("--guest-speed", type=float, default=2.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=0.1)
    options = parser.parse_args()
    speeds = [float(speed) for speed in options.speeds.split(",")]
    ways = [(guests, known, timeout) for known in (False, True) for timeout in (0.0, options.timeout)
            for guests in (1, 2, 4)]  # fmt: skip
    ratios: dict[tuple[int, bool, float], list[float]] = {way: [] for way in ways}
    shorter: dict[tuple[int, bool, float], list[float]] = {way: [] for way in ways}
    for seed in range(options.seeds):
        draw = random.Random(seed)
        seconds = [draw.lognormvariate(0.0, 1.0) for _ in range(options.groups)]
        for guests, known, timeout in ways:
            alone_s = ideal_s(seconds, speeds, 0.0, options.at_once)
            best_s = ideal_s(seconds, speeds, guests * options.guest_speed, options.at_once)
            rollout = Visited(
                seconds, speeds, options.at_once, best_s, guests=guests, guest_speed=options.guest_speed,
                timeout=timeout,
            )  # fmt: skip
            ranks = [*range(len(speeds)), *range(GUESTS, GUESTS + guests)]
            paces = {rank: Pace(speed, 1.0, options.at_once) for rank, speed in enumerate(speeds)}
            paces |= {rank: Pace(options.guest_speed, 1.0, options.at_once) for rank in ranks[len(speeds) :]}
            costs = dict(enumerate(seconds)) if known else {}
            members = ranks if known else ranks[: len(speeds)]
            with tempfile.TemporaryDirectory() as directory:
                run_dir = RunDir(Path(directory))
                files.make_directory(run_dir.claims)
                claims = {rank: Claims(run_dir, 1, 1, 2, rank) for rank in ranks}
                chunks = cut_into_chunks(range(len(seconds)), costs, members, paces if known else {})
                took_s = rollout.with_guests(chunks, claims)
            made = {slot for node in rollout.nodes.values() for slot in node.seconds}
            assert made == set(range(options.groups)), "a group was lost"
            ratios[guests, known, timeout].append(took_s / best_s)
            shorter[guests, known, timeout].append(1 - took_s / alone_s)
    print(f"{'':52} median  worst  shorter than the best without")
    for (guests, known, timeout), found in ratios.items():
        name = f"{guests} guest{'s'[: guests > 1]}, {'known' if known else 'nothing known'}, "
        name += "killed" if timeout else "leave in order"
        gain = statistics.median(shorter[guests, known, timeout])
        print(f"{name:52} {statistics.median(found):6.3f} {max(found):6.3f}  {gain:6.1%}")


if __name__ == "__main__":
    main()
