"""Measure what two crews gain: an iteration at --max-async-level 1 against one where they take turns (0).

Three real nodes, two that generate and one that trains; generating and training last --seconds each: the
small real work is done, then the row waits. Prints one JSON line for each level: seconds from the end of an
iteration to that of the next (median, worst), as a multiple of --seconds too, and how long each crew waited
for the other; then how many times as fast the second one is.

    python scripts/bench/overlap.py --seconds 10 --iterations 12 --dir /tmp/overlap

With --lengths, level 1 alone: generating lasts as long as SAMPLES samples of lognormal lengths (sigma 1)
would take in SLOTS slots, whose work would fill --seconds if none was ever empty. `whole`: each sample in its
iteration; `segments`: the mean length at most in one. Prints which part of the time the slots were busy.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.journal import logs
from coordinator.main import run_node
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import rollout, training
from coordinator.protocol import placement_records
from coordinator.settings.placement import Crew
from coordinator.start.request import StartRequest

WARM_UP = 3
"""First iterations, which do not count: the crews are not yet one apart."""
CREWS: tuple[Crew, ...] = ("rollout", "rollout", "train")
SLOTS, SAMPLES = 64, 512
"""How many samples are generated at once, and in an iteration, with --lengths."""
SETTINGS = {
    "cluster.num_nodes": 3,
    "cluster.place": ["rollout=0-1", "train=2"],
    "tiny.warmup_steps": 0,
    "rollout.tasks_per_iteration": 16,
    "rollout.samples_per_task": 4,
    "eval.interval": 0,
    "trainer.global_batch_size": 64,
    "trainer.threads_per_process": 1,
}


def at_least(
    seconds: Callable[[int], float], act: Callable[[Node, Iteration], Any]
) -> Callable[[Node, Iteration], Any]:
    """Return a row's action that lasts so long in each iteration."""

    def acted(node: Node, iteration: Iteration) -> Any:
        ends_s = time.monotonic() + seconds(iteration.number)
        payload = act(node, iteration)
        while time.monotonic() < ends_s:
            node.check()
            time.sleep(0.01)
        return payload

    return acted


def rollouts(lengths: str, iterations: int, seconds: float) -> list[tuple[float, float]]:
    """Return how long the rollout of each iteration lasts, and how long if no slot was ever empty."""
    drawn, left, found = random.Random(0), list[float](), list[tuple[float, float]]()
    mean = math.exp(0.5)
    unit_s = seconds * SLOTS / (SAMPLES * mean)
    most = math.inf if lengths == "whole" else mean
    for _ in range(iterations):
        samples = [
            *left,
            *(drawn.lognormvariate(0.0, 1.0) for _ in range(SAMPLES)),
        ]  # what was begun is first
        slots = [0.0] * SLOTS
        for sample in samples:
            heapq.heapreplace(slots, slots[0] + min(sample, most))
        left = [sample - most for sample in samples if sample > most]
        work = sum(min(sample, most) for sample in samples)
        found.append((max(slots) * unit_s, work / SLOTS * unit_s))
    return found


def run_one(root: Path, machine: int, level: int, options: argparse.Namespace) -> int:
    """Run one node; returns its exit code."""
    count = options.iterations + WARM_UP
    lasts = [options.seconds] * count
    if options.lengths:
        lasts = [taken for taken, _ in rollouts(options.lengths, count, options.seconds)]
    rollout.collect_train = at_least(lambda number: lasts[number - 1], rollout.collect_train)
    training.train = at_least(lambda _number: options.seconds, training.train)
    more = {"iterations": options.iterations + WARM_UP, "cluster.max_async_level": level}
    crew = CREWS[machine]
    overrides = {} if machine else {**SETTINGS, **more}
    return run_node(StartRequest(root, machine, overrides, crew=crew), logs.set_up(machine, crew))


def measure(root: Path, level: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run all nodes, and return the line."""
    placement_records.publish_placement(
        root, placement_records.Placement(len(CREWS), ("rollout=0-1", "train=2"))
    )
    for machine in range(len(CREWS)):
        placement_records.publish_devices(root, machine, "localhost", 1)
    command = [sys.executable, *sys.argv, "--level", str(level), "--machine"]
    nodes = [
        subprocess.Popen([*command, str(machine)], stderr=subprocess.DEVNULL) for machine in range(len(CREWS))
    ]
    codes = [node.wait() for node in nodes]
    lines = published.metrics_lines(RunDir(root))[WARM_UP:]
    seconds = [line["seconds"] for line in lines]
    idle = {
        crew: statistics.mean(line["idle_seconds"][crew] or 0.0 for line in lines)
        for crew in ("rollout", "train")
    }
    median_s = statistics.median(seconds)
    if options.lengths:
        works = [work for _, work in rollouts(options.lengths, options.iterations + WARM_UP, options.seconds)]
        mean_s, busy = statistics.mean(seconds), sum(works[WARM_UP:]) / sum(seconds)
        return {
            "lengths": options.lengths,
            "codes": codes,
            "seconds": round(mean_s, 3),
            "busy": round(busy, 3),
        }
    return {
        "level": level,
        "codes": codes,
        "seconds": round(median_s, 3),
        "worst": round(max(seconds), 3),
        "of_one_half": round(median_s / options.seconds, 3),
        "idle": {crew: round(idle_s, 2) for crew, idle_s in idle.items()},
    }


def main() -> int:
    """Measure both levels and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of generating, and of training")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--dir", type=Path, required=True, help="a directory that is not there yet")
    parser.add_argument("--lengths", choices=("whole", "segments"))
    parser.add_argument("--level", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--machine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.dir.absolute()
    if options.machine is not None:
        where = root if options.lengths else root / f"level_{options.level}"
        return run_one(where, options.machine, options.level, options)
    if options.lengths:
        print(json.dumps(measure(root, 1, options)))
        return 0
    said = [measure(root / f"level_{level}", level, options) for level in (0, 1)]
    for line in said:
        print(json.dumps(line))
    print(json.dumps({"times_as_fast": round(said[0]["seconds"] / said[1]["seconds"], 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
