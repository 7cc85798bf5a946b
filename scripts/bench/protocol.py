"""Measure what the protocol costs: iterations of 14 phases without work, by N real node processes.

Prints one JSON line: seconds per iteration (median, p99), metadata operations per node and phase (heartbeats
included), bytes and files left on disk. `--dirs` gives each node its own mount of the same directory.

    python scripts/bench/protocol.py --nodes 3 --dir /tmp/bench
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from coordinator.directory.layout import RunDir
from coordinator.journal import logs
from coordinator.main import live
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.node.start import start_master, start_worker
from coordinator.protocol.phases import Phase
from coordinator.rows.table import run_iteration
from rollout.storage import files

WARM_UP = 3
"""First iterations, which do not count."""


class EmptyRows:
    """The node of a main loop in which no row has any work."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.rank, self.settings, self.run_dir = node.rank, node.settings, node.run_dir

    def step(self, iteration: Iteration, phase: Phase, _act: Any, then: Any = None) -> None:
        """Run the row without its action; its flags, its waits and its payloads are real."""
        self._node.step(iteration, phase, self._nothing, self._conclude if then else None)

    @staticmethod
    def _nothing(_node: Node, _iteration: Iteration) -> Payload:
        return {"resume_at": int(Phase.TRAIN_PLAN), "verifier": None}

    @staticmethod
    def _conclude(_node: Node, _iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
        return {"heard": len(payloads)}


def run_node(root: Path, rank: int, nodes: int, iterations: int) -> None:
    """Run one node, and print what it measured."""
    seconds: list[float] = []
    counts: dict[str, int] = {}

    def iterate(node: Node) -> None:
        numbers = itertools.count(1)
        rows = cast(Node, EmptyRows(node))
        before = files.operations.copy()
        for number in range(iterations + WARM_UP):
            if number == WARM_UP:
                before = files.operations.copy()
            started_s = time.perf_counter()
            iteration = node.next_iteration(number, lambda _node: next(numbers))
            assert iteration is not None
            run_iteration(rows, iteration)
            seconds.append(time.perf_counter() - started_s)
        counts.update(files.operations - before)

    settings: dict[str, Any] = {"cluster.num_nodes": nodes, "cluster.rejoin_timeout_s": 300}
    start = start_worker(root, rank, {}) if rank else start_master(root, settings)
    code = live(start, logs.set_up(rank), iterate)
    print(json.dumps({"rank": rank, "code": code, "seconds": seconds[WARM_UP:], "operations": counts}))


def main() -> None:
    """Start the nodes, wait for them, print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--dir", type=Path, help="an empty directory")
    parser.add_argument("--dirs", help="one path of the same directory per node, separated by commas")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = options.dirs.split(",") if options.dirs else [options.dir] * options.nodes
    roots = [Path(root) for root in given if root]
    if len(roots) != options.nodes:
        parser.error(f"give --dir DIR, or --dirs with {options.nodes} paths")
    if options.rank is not None:
        run_node(roots[options.rank].absolute(), options.rank, options.nodes, options.iterations)
        return
    RunDir(roots[0]).base_model.mkdir(parents=True)  # there is no model to make
    commands = [[sys.executable, *sys.argv, "--rank", str(rank)] for rank in range(options.nodes)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for command in commands
    ]
    said = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in started]
    print(json.dumps(summary(said, options.iterations, RunDir(roots[0]))))


def summary(said: list[dict[str, Any]], iterations: int, run_dir: RunDir) -> dict[str, Any]:
    """Return the line; seconds are the master's, since a row ends when its flag is raised."""
    seconds = said[0]["seconds"]
    rows = iterations * len(Phase)
    per_row = [{name: count / rows for name, count in node["operations"].items()} for node in said]
    totals = [sum(node.values()) for node in per_row]
    left = [path for directory in run_dir.protocol for path in directory.iterdir() if path.is_file()]
    return {
        "nodes": len(said),
        "iterations": iterations,
        "codes": sorted({node["code"] for node in said}),
        "seconds_median": round(statistics.median(seconds), 5),
        "seconds_p99": round(statistics.quantiles(seconds, n=100)[98], 5),
        "operations_master": round(totals[0], 2),
        "operations_worker": round(statistics.mean(totals[1:]), 2) if totals[1:] else None,
        "operations_worker_by_name": {name: round(count, 2) for name, count in sorted(per_row[-1].items())},
        "bytes_left": sum(path.stat().st_size for path in left),
        "files_left": len(left),
    }


if __name__ == "__main__":
    main()
