"""Compare a whole iteration of three nodes on this machine, and of one, with a step of TRL's GRPOTrainer.

    .venv-trl/bin/python scripts/bench/iteration.py [--directory /tmp] [--rounds 3] [--iterations 14]

Prints one JSON line. Flagpost: `run local` with the embedded engine, 64 prompts x 8 samples of at most 8
tokens, every trajectory and checkpoint durable, from the start of one iteration to the start of the next.
TRL: one process that saves nothing, from the end of one step to the end of the next, with transformers'
generate (its continuous batching, --trl-continuous-batching, takes seconds a step on a CPU) and the faster
--trl-microbatch. Both: the same model directory, tasks (builtin:arithmetic), reward (exact), Python, torch
and transformers, float32 training, one optimizer step of 512 samples (Flagpost leaves out groups without an
advantage), learning rate 1e-6, so that the work stays the same. They take turns; of each turn the median
after --skip iterations counts; a ratio is the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from elsewhere import Elsewhere
from trl_trainer import need_trl

from coordinator.protocol.phase import Phase
from rollout.rewards.builtin import exact
from rollout.tasks.task_set import load_tasks

PROMPTS, SAMPLES, MAX_TOKENS = 64, 8, 8
LEARNING_RATE = 1e-6
TURN_TIMEOUT_S = 900.0


# ---- Flagpost


def run_nodes(options: argparse.Namespace, nodes: int, root: Path) -> None:
    """Take one turn of Flagpost in the run directory `root`."""
    settings = {
        "rollout.tasks_per_iteration": PROMPTS,
        "rollout.samples_per_task": SAMPLES,
        "rollout.max_tokens": MAX_TOKENS,
        "rollout.concurrency": PROMPTS * SAMPLES,
        "engine.max_batch": PROMPTS * SAMPLES,  # TRL generates all of them together too
        "trainer.global_batch_size": PROMPTS * SAMPLES,
        "trainer.learning_rate": LEARNING_RATE,
        "eval.interval": 0,
        "iterations": options.iterations,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    argv = [sys.executable, "-m", "coordinator.cli", "local", "--num-nodes", str(nodes), "--engine", "torch"]
    turn([*argv, "--log-path", str(root), *overrides, *options.settings])


def turn(argv: list[str]) -> str:
    """Run a process and return what it prints; if it fails, end the benchmark with its last words."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    made = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=TURN_TIMEOUT_S, check=False
    )
    if made.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}\n{made.stdout[-2000:]}\n{made.stderr[-3000:]}")
    return made.stdout


def iteration_seconds(root: Path, skip: int) -> list[float]:
    """Seconds from the start of each iteration after `skip` to the next start, by one machine's clock."""
    opened = sorted(root.glob("train_trajectories/iteration_*/iteration.json"))
    times_ns = [path.stat().st_mtime_ns for path in opened][skip:]
    return [(after - before) / 1e9 for before, after in pairwise(times_ns)]


def metrics_lines(root: Path, skip: int) -> list[dict[str, Any]]:
    """Read the metrics of the iterations after `skip`."""
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()][skip:]


def of_rows(root: Path, skip: int) -> dict[str, Any]:
    """Return median ms of each phase, as the master saw it, and of the ranks' waits, from metrics.jsonl."""
    lines = metrics_lines(root, skip)
    return {
        "rows_ms": {
            phase.label: median_ms(line["phase_seconds"][phase.label] for line in lines)
            for phase in Phase
            if all(phase.label in line["phase_seconds"] for line in lines)
        },
        "wait_ms": {
            rank: median_ms(line["wait_seconds"][rank] for line in lines) for rank in lines[0]["wait_seconds"]
        },
        "reward": round(statistics.mean(line["reward"] for line in lines), 3),
    }


# ---- TRL


def trl_turn(model: Path, steps: int, microbatch: int, continuous: bool) -> dict[str, Any]:
    """Take TRL's steps in this process."""
    import trl_trainer

    tasks = load_tasks("builtin:arithmetic", seed=0, split="train").tasks
    rows = [{"prompt": task["prompt"], "answer": task["answer"]} for task in tasks[: PROMPTS * (steps + 1)]]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [exact({"answer": wanted}, said) for said, wanted in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as output_dir:
        seconds, metrics = trl_trainer.train(
            model,
            rows,
            reward,
            Path(output_dir),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=PROMPTS * SAMPLES // microbatch,
            num_generations=SAMPLES,
            max_completion_length=MAX_TOKENS,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            use_transformers_continuous_batching=continuous,
        )
    return {"seconds": seconds, "reward": float(metrics["reward"])}


def run_trl(model: Path, steps: int, skip: int, microbatch: int, continuous: bool = False) -> dict[str, Any]:
    """Take one turn of TRL; return median seconds of a step, wall and CPU, and the last mean reward."""
    said = {"model": str(model), "steps": steps, "microbatch": microbatch, "continuous": continuous}
    made = json.loads(turn([sys.executable, __file__, "--trl-turn", json.dumps(said)]).splitlines()[-1])
    walls, cpus = zip(*made["seconds"][skip:], strict=True)
    return {"s": statistics.median(walls), "cpu_s": statistics.median(cpus), "reward": made["reward"]}


# ---- the turns


def median_ms(seconds: Iterable[float]) -> float:
    """Return the median in ms."""
    return round(1000 * statistics.median(seconds), 2)


def fsync_ms(directory: Path) -> float:
    """Measure median ms of writing 64 KiB durably into a new file there."""
    seconds: list[float] = []
    for number in range(50):
        path = directory / f"fsync{number}"
        began_s = time.perf_counter()
        with path.open("wb") as file:
            file.write(bytes(65536))
            file.flush()
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - began_s)
        path.unlink()
    return median_ms(seconds)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Take all turns and return the line."""
    options.number = 0

    def node_turn(nodes: int) -> Path:
        options.number += 1
        root = directory / f"run{options.number}"
        run_nodes(options, nodes, root)
        return root

    model = node_turn(1) / "base_model"  # so that it is made before it counts
    sides: dict[str, Callable[[], Any]] = {
        "nodes_3": partial(node_turn, 3),
        **{
            f"trl_{size}": partial(run_trl, model, options.iterations, options.skip, size)
            for size in options.trl_microbatch
        },
        "nodes_1": partial(node_turn, 1),
    }
    made: dict[str, list[Any]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    watch = Elsewhere()
    for number in range(options.rounds):
        names = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
        for name in names:
            result = sides[name]()
            made[name].append(result)
            ours = isinstance(result, Path)
            took = statistics.median(iteration_seconds(result, options.skip)) if ours else result["s"]
            seconds[name].append(took)
            print(f"round {number + 1}, {name}: {took:.3f} s", file=sys.stderr)
    line = _line(options, seconds, made)
    line["cores_busy_elsewhere"] = watch.cores()
    line["fsync_ms"] = fsync_ms(directory)
    if options.trl_continuous_batching:
        found = run_trl(model, 4, 1, options.trl_microbatch[0], continuous=True)
        line["trl_continuous_batching_s"] = round(found["s"], 2)
    return line


def _line(
    options: argparse.Namespace, seconds: Mapping[str, list[float]], made: Mapping[str, list[Any]]
) -> dict[str, Any]:
    """Return seconds and ratios of the turns."""
    of_trl = {name: found for name, found in seconds.items() if name.startswith("trl_")}
    fastest = min(of_trl, key=lambda name: statistics.median(of_trl[name]))
    line: dict[str, Any] = {
        "cores": os.cpu_count(),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "global_batch": PROMPTS * SAMPLES,
        "rounds": options.rounds,
        "trl": {
            **_spread(of_trl[fastest]),
            "cpu_s": round(statistics.median(turn["cpu_s"] for turn in made[fastest]), 3),
            "reward": round(statistics.mean(turn["reward"] for turn in made[fastest]), 3),
            "microbatch": int(fastest.removeprefix("trl_")),
        },
    }
    for name in ("nodes_3", "nodes_1"):
        ratios = [ours / trl for ours, trl in zip(seconds[name], of_trl[fastest], strict=True)]
        line[name] = {
            **_spread(seconds[name]),
            "of_trl": round(statistics.median(ratios), 3),
            "of_trl_range": [round(min(ratios), 3), round(max(ratios), 3)],
            **of_rows(made[name][-1], options.skip),
        }
    return line


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "s": round(statistics.median(seconds), 4),
        "s_range": [round(min(seconds), 4), round(max(seconds), 4)],
    }


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("/tmp"), help="on a local disk; default: /tmp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=14, help="of a turn")
    parser.add_argument("--skip", type=int, default=3, help="of them that do not count: engines start")
    parser.add_argument("--trl-microbatch", type=int, nargs="+", default=[512, 128], help="samples")
    parser.add_argument("--trl-continuous-batching", action="store_true")
    parser.add_argument("--settings", nargs="*", default=[], help="for Flagpost: further key=value")
    parser.add_argument("--trl-turn", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    need_trl(parser)
    if options.trl_turn:
        print(json.dumps(trl_turn(**{**options.trl_turn, "model": Path(options.trl_turn["model"])})))
        return
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as directory:
        print(json.dumps(measure(options, Path(directory))))


if __name__ == "__main__":
    main()
