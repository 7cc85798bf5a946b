"""Measure what a head start saves: an iteration with checkpoints.head_start and without, on a slow mount.

    .venv/bin/python scripts/bench/head_start.py [--parameters 3e7] [--latency-ms 4] [--rounds 3] [--local]

Makes a random Qwen3 and trains it on two nodes of this machine with the embedded engine. The run directory is
on a FUSE filesystem (tests/faultfs) each of whose operations takes --latency-ms; with --local it is in
--directory itself. Both ways take turns. Prints one JSON line: for each way the median seconds of an
iteration and of its rows from training on; `ratio`: with a head start over without, median of the rounds. The
first two iterations and the last one do not count: engines and trainers start, and the last has no next one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from large import make_model

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.faultfs import FaultFs

SKIP = 2
ROWS = ("train_rollout", "training", "checkpoint", "engine_restarted")
SETTINGS = {
    "rollout.tasks_per_iteration": 16,
    "rollout.samples_per_task": 4,
    "rollout.max_tokens": 32,
    "eval.interval": 0,
    "trainer.global_batch_size": 64,
    "trainer.save_interval": 100,
    "trainer.learning_rate": 1e-5,
}


def run_once(
    root: Path, directory: Path, head_start: bool, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Take one turn; returns the metrics lines that count."""
    given = {**SETTINGS, "iterations": options.iterations + SKIP + 1}
    given["checkpoints.head_start"] = str(head_start).lower()
    command = [sys.executable, "-m", "coordinator.cli", "local", "--num-nodes", "2", "--log-path", str(root)]
    command += [
        "--model",
        str(directory / "model"),
        "--reward",
        "rewards:length",
        *(f"{k}={v}" for k, v in given.items()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return lines[SKIP:-1]


def main() -> None:
    """Read the options, let both ways take turns, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=3e7)
    parser.add_argument("--latency-ms", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as made:
        directory = Path(made)
        parameters = make_model(directory / "model", options.parameters)
        (directory / "rewards.py").write_text(
            "def length(task, completion):\n    return len(completion) % 7\n"
        )
        for turn in range(options.rounds):
            for head_start in (False, True):
                below = directory / f"{turn}{head_start}"
                below.mkdir()
                with nullcontext() if options.local else FaultFs(below, 1) as mounts:
                    place = below if mounts is None else mounts[0].path
                    if mounts is not None:
                        mounts.set(latency_s=options.latency_ms / 1000)
                    lines = run_once(place / "run", directory, head_start, options)
                of_rows = {
                    row: statistics.median(line["phase_seconds"][row] for line in lines) for row in ROWS
                }
                seconds = statistics.median(line["seconds"] for line in lines)
                found[head_start].append({"seconds": seconds, **of_rows})
    shown = {
        ("head start" if way else "none"): {
            key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]
        }
        for way, turns in found.items()
    }
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(found[False], found[True], strict=True)]
    print(json.dumps({
        "parameters": parameters, "latency_ms": None if options.local else options.latency_ms, **shown,
        "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
