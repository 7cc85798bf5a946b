"""Measure how long a job takes from the command `submit` to its first line of metrics, and where that goes.

    .venv/bin/python scripts/bench/submit.py [--rounds 3]

The client is a copy of scripts/flagpost_client.py that finds nothing of Flagpost. The server is warm: it has
had a job before, which has made the built-in model. Prints one JSON line. All times are seconds since the
command was typed: `submitted_s` when it has printed the job's name, `started_s` when the process of the job
has begun, `run_s` when there is a run directory, `engine_s` when the engine answers, `first_part_s` when the
first trajectories are on disk, `metrics_s` when the server tells the first line of metrics.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]
TOKEN = "a-token-of-a-benchmark"
LOOK_S = 0.02
TIMEOUT_S = 300.0
OPTIONS = ("--iterations", "1", "eval.interval=0")


def measure(laptop: Path, jobs: Path, env: dict[str, str], name: str) -> dict[str, float]:
    """Submit one job and follow it to its first line of metrics."""
    client, root = [sys.executable, "-I", "client.py"], jobs / name
    began_s, found = time.monotonic(), dict[str, float]()
    subprocess.run([*client, "submit", "--name", name, *OPTIONS], cwd=laptop, env=env, check=True)
    found["submitted_s"] = time.monotonic() - began_s
    marks = {
        "started_s": "job/start_0001/process.json",
        "run_s": "run.json",
        "first_part_s": "train_trajectories/*/r*.part*",
        "metrics_s": "metrics.jsonl",
    }
    while "metrics_s" not in found:
        now_s = time.monotonic() - began_s
        if now_s > TIMEOUT_S:
            raise SystemExit(f"no metrics within {TIMEOUT_S:.0f} s; see {root}")
        found |= {key: now_s for key, path in marks.items() if key not in found and any(root.glob(path))}
        time.sleep(LOOK_S)
    listed = subprocess.run(
        [*client, "jobs"], cwd=laptop, env=env, check=True, capture_output=True, text=True
    )
    assert name in listed.stdout
    found["metrics_s"] = time.monotonic() - began_s
    found["engine_s"] = _engine_ready_s(root, began_s)
    subprocess.run([*client, "overwatch", name], cwd=laptop, env=env, check=True, capture_output=True)
    return found


def _engine_ready_s(root: Path, began_s: float) -> float:
    """When the engine of rank 0 was ready; its clock is this machine's."""
    for line in (root / "events/rank_0000.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line) if line else {}
        if event.get("what") == "engine_ready":
            return event["t"] - began_s
    return float("nan")


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        laptop, jobs = Path(directory, "laptop"), Path(directory, "jobs")
        laptop.mkdir()
        shutil.copy(HERE / "scripts" / "flagpost_client.py", laptop / "client.py")
        env = {**os.environ, "FLAGPOST_TOKEN": TOKEN}
        command = [sys.executable, "-m", "coordinator.cli", "serve", "--root", str(jobs), "--port", "0"]
        server = subprocess.Popen(command, cwd=HERE, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            env["FLAGPOST_SERVER"] = server.stdout.readline().split(" at ")[1].split(";")[0]
            measure(laptop, jobs, env, "warm")
            rounds = [measure(laptop, jobs, env, f"round-{number}") for number in range(options.rounds)]
        finally:
            server.terminate()
            server.wait()
    medians = {key: round(statistics.median(one[key] for one in rounds), 2) for key in sorted(rounds[0])}
    ordered = dict(sorted(medians.items(), key=lambda item: item[1]))
    every = [round(one["metrics_s"], 2) for one in rounds]
    print(
        json.dumps({**ordered, "each_metrics_s": every, "cores": os.cpu_count(), "load": os.getloadavg()[0]})
    )


if __name__ == "__main__":
    main()
