"""Measure whether the ten-thousandth iteration costs what the first did, with real nodes on this machine.

    .venv/bin/python scripts/bench/endurance.py [--iterations 10000] [--nodes 2] [--keep DIR] [key=value ...]

The nodes generate with an engine that answers at once, and do not train: 2 groups of 1 sample an iteration.
Prints one JSON line. `marks`, at every tenth of the run: iterations per second since the mark before; of each
rank's process resident memory (MB), open descriptors and CPU milliseconds per iteration; names in protocol/;
files, directories and bytes of the run. The run is in a temporary directory, or in DIR.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from overhead import instant_server
from vllm_server import Elsewhere

from coordinator.directory.layout import RunDir

SETTINGS = {
    "rollout.tasks_per_iteration": 2,
    "rollout.samples_per_task": 1,
    "rollout.max_tokens": 1,
    "eval.interval": 0,
    "tiny.warmup_steps": 0,
}
MARKS = 10
BEYOND = 10
"""So many more iterations are run, for the nodes are there to be looked at when the last mark is passed."""
LOOK_S = 0.2


def start(root: Path, rank: int, options: argparse.Namespace, port: int) -> subprocess.Popen[bytes]:
    """Start a node; what it logs is in the run directory."""
    argv = [sys.executable, "-m", "coordinator.cli", "--log-path", str(root)]
    argv += ["--engine-url", f"http://127.0.0.1:{port}"]
    if rank:
        argv += ["--worker", str(rank)]
    else:
        last = options.iterations + BEYOND
        argv += ["--master", "--num-nodes", str(options.nodes), "--iterations", str(last)]
        argv += ["--rl-phase", "rollout", *(f"{name}={value}" for name, value in SETTINGS.items())]
        argv += options.settings
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Follower:
    """Looks at a run, and notes what it costs at every mark."""

    def __init__(self, run_dir: RunDir, nodes: list[psutil.Process], every: int) -> None:
        self.marks: list[dict[str, Any]] = []
        self._run_dir = run_dir
        self._nodes = nodes
        self._every = every
        self._read = self._iterations = 0
        self._since = (0, time.monotonic(), [0.0] * len(nodes))

    def look(self) -> None:
        """Count the iterations that have ended; note a mark if one was passed."""
        with contextlib.suppress(FileNotFoundError), self._run_dir.metrics.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            self._read += len(data)
            self._iterations += data.count(b"\n")
        if self._iterations - self._since[0] >= self._every or not self._since[0] < self._iterations:
            self._note()

    def _note(self) -> None:
        before, since_s, since_cpu_s = self._since
        now_s, done = time.monotonic(), self._iterations
        try:
            cpu_s = [sum(node.cpu_times()[:2]) for node in self._nodes]
            memory = [round(node.memory_info().rss / 1e6, 1) for node in self._nodes]
            descriptors = [node.num_fds() for node in self._nodes]
        except psutil.Error:  # they end
            return
        self._since = done, now_s, cpu_s
        if done == before:
            return  # nothing has ended yet: the first mark counts from here on
        spent_s = [now - then for now, then in zip(cpu_s, since_cpu_s, strict=True)]
        mark = {
            "iteration": done,
            "per_s": round((done - before) / (now_s - since_s), 2),
            "memory_mb": memory,
            "descriptors": descriptors,
            "cpu_ms": [round(1000 * seconds / (done - before), 2) for seconds in spent_s],
            "protocol_names": sum(len(os.listdir(directory)) for directory in self._run_dir.protocol),
            **size_of(self._run_dir.root),
        }
        self.marks.append(mark)
        print(json.dumps(mark), file=sys.stderr, flush=True)


def size_of(root: Path) -> dict[str, int]:
    """Return how many files and directories are below `root`, and their bytes."""
    number = size = 0
    for directory, names, found in os.walk(root):
        number += len(names) + len(found)
        for name in found:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(directory, name)).st_size
    return {"files": number, "bytes": size}


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run the nodes to their end and return the line."""
    watch = Elsewhere()
    with instant_server(1, 1, []) as port:
        nodes = [start(root, rank, options, port) for rank in range(options.nodes)]
        try:
            processes = [psutil.Process(node.pid) for node in nodes]
            follower = Follower(RunDir(root), processes, max(1, options.iterations // MARKS))
            while any(node.poll() is None for node in nodes):
                follower.look()
                time.sleep(LOOK_S)
        finally:
            for node in nodes:
                node.terminate()
            codes = [node.wait() for node in nodes]
    return {
        "bench": "endurance",
        "nodes": options.nodes,
        "iterations": options.iterations,
        "settings": options.settings,
        "codes": codes,
        "cores_busy_elsewhere": watch.cores(),
        "marks": follower.marks,
    }


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for the run")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        print(json.dumps(measure(options, options.keep or Path(directory) / "run")))


if __name__ == "__main__":
    main()
