"""Measure a start on this machine: from the command `run local` to the first sample, and to the first policy.

    .venv/bin/python scripts/bench/start.py [--nodes 1 3] [--rounds 3] [--base CHECKOUT]

Prints one JSON line. `first_sample_s` ends when the first part of trajectories is in the run directory,
`first_policy_s` when the first iteration has trained; `stages_s` says when rank 0 came to what lies between.
`cpu_s` is what each kind of process has used until the first sample, `cpu_to_policy_s` until the first
policy. The built-in model is made before. --base: another checkout, with its own .venv, that takes turns with
this one; `ratio` is the median over the rounds of this one's time by that one's.
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

import psutil
from elsewhere import Elsewhere

HERE = Path(__file__).parents[2]
LOOK_S = 0.01
TIMEOUT_S = 300.0
SETTINGS = (
    *("rollout.tasks_per_iteration=16", "rollout.samples_per_task=8", "rollout.max_tokens=8"),
    *("eval.interval=0", "iterations=1", "tiny.warmup_steps=30"),
)
KINDS = {
    "coordinator.cli": "nodes",
    "embedded.server": "engines",
    "trainer.job.agent": "agents",
    "-m trainer ": "trainers",
    "reaper.py": "reapers",
    "forks.py": "clients of forks",
    "trainer.job.forks": "shared imports, and their forks",
}
"""Part of a command line -> kind of process; the last one that fits counts."""


def start(checkout: Path, nodes: int, root: Path, env: dict[str, str]) -> dict[str, Any]:
    """Start a run of one iteration, and follow it to its end."""
    python = checkout / ".venv/bin/python"
    argv = [str(python), "-m", "coordinator.cli", "local", "--num-nodes", str(nodes), "--engine", "torch"]
    began_s = time.monotonic()
    run = subprocess.Popen(
        [*argv, "--log-path", str(root), *SETTINGS],
        cwd=checkout,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    top, used = psutil.Process(run.pid), dict[int, tuple[str, float]]()
    found: dict[str, Any] = {}
    while run.poll() is None and time.monotonic() - began_s < TIMEOUT_S:
        _count_cpu(top, used)
        if "first_sample_s" not in found and any(root.glob("train_trajectories/*/r*.part*")):
            found |= {"first_sample_s": time.monotonic() - began_s, "cpu_s": _by_kind(used)}
        if "first_policy_s" not in found and (root / "checkpoints/iteration_000001").is_dir():
            found |= {"first_policy_s": time.monotonic() - began_s, "cpu_to_policy_s": _by_kind(used)}
        time.sleep(LOOK_S)
    if run.wait() != 0 or "first_policy_s" not in found:
        raise SystemExit(f"{checkout}: run local ended with {run.returncode}; see {root}/logs")
    return {**found, "stages_s": _stages(root, began_s)}


def _count_cpu(top: psutil.Process, used: dict[int, tuple[str, float]]) -> None:
    try:
        processes = [top, *top.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            words, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        kinds = [kind for part, kind in KINDS.items() if part in words]
        kind = "run local" if process.pid == top.pid else kinds[-1] if kinds else "other"
        if words:
            used[process.pid] = kind, times.user + times.system


def _by_kind(used: dict[int, tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for kind, seconds in used.values():
        sums[kind] = sums.get(kind, 0.0) + seconds
    return {
        **{kind: round(seconds, 2) for kind, seconds in sums.items()},
        "all": round(sum(sums.values()), 2),
    }


def _stages(root: Path, began_s: float) -> dict[str, float]:
    """When rank 0 came to each stage; its clock is this machine's."""
    wanted = {
        "process": "node",
        "epoch": "epoch",
        "engine_start": "engine_start",
        "engine_ready": "engine_ready",
    }
    stages: dict[str, float] = {}
    for line in (root / "events/rank_0000.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line) if line else {}
        name = wanted.get(str(event.get("what")), "")
        if event.get("what") == "end" and event.get("row") == "training":
            name = "trained"
        if name:
            stages.setdefault(name, round(event["t"] - began_s, 2))
    return stages


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base", type=Path)
    options = parser.parse_args()
    checkouts = {"now": HERE, **({"base": options.base.absolute()} if options.base else {})}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        env = {**os.environ, "XDG_CACHE_HOME": f"{directory}/cache"}
        env.pop("OMP_NUM_THREADS", None)
        for name, checkout in checkouts.items():  # makes the model, and what Python compiles
            start(checkout, 1, Path(directory, f"first-{name}"), env)
        for nodes in options.nodes:
            watch, turns = Elsewhere(), {name: list[dict[str, Any]]() for name in checkouts}
            for number in range(options.rounds):
                for name, checkout in checkouts.items():
                    root = Path(directory, f"{name}-{nodes}-{number}")
                    turns[name].append(start(checkout, nodes, root, env))
                    shutil.rmtree(root)
            rows.append({"nodes": nodes, **_summary(turns), "cores_busy_elsewhere": watch.cores()})
    print(json.dumps({"cores": os.cpu_count(), "python": sys.version.split()[0], "rows": rows}))


def _summary(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, of_one in turns.items():
        middle = sorted(of_one, key=lambda turn: turn["first_sample_s"])[len(of_one) // 2]
        seconds = {
            key: [round(turn[key], 2) for turn in of_one] for key in ("first_sample_s", "first_policy_s")
        }
        row[name] = {**middle, **seconds}
    if "base" in turns:
        for key in ("first_sample_s", "first_policy_s"):
            pairs = zip(turns["now"], turns["base"], strict=True)
            row[f"ratio_{key}"] = round(statistics.median(now[key] / base[key] for now, base in pairs), 2)
        cpu = [statistics.median(turn["cpu_s"]["all"] for turn in turns[name]) for name in ("now", "base")]
        row["ratio_cpu_s"] = round(cpu[0] / cpu[1], 2)
    return row


if __name__ == "__main__":
    main()
