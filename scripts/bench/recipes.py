"""Run the recipes for a CPU, one after the other, each beside a control whose reward is noise.

    python scripts/bench/recipes.py --seeds 0,1,2 --dir DIR [--real]

Prints a JSON line for each run: the wall seconds from the command to its end (the built-in model was made
before), and the curve: how many samples of each iteration are right. A control learns from coins; its curve
counts what is right all the same. Distillation does not learn from rewards: the teacher of its control is the
model that it starts from. `--real`: the recipe with a real model instead.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator import Run

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CONTROL = ("--reward", "recipes:coin=1", "--reward", "exact=0")


def coin(_task: dict[str, object], _completion: str) -> float:
    """A reward that says nothing."""
    return float(random.random() < 0.5)


def main() -> None:
    """Parse the command line, run all, print."""
    parser = argparse.ArgumentParser(description="Run the recipes for a CPU beside their controls.")
    parser.add_argument("--dir", type=Path, required=True, help="where the runs go; new")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--real", action="store_true", help="real-cpu alone, with its control")
    arguments = parser.parse_args()
    for seed in arguments.seeds.split(","):
        root: Path = arguments.dir / f"seed_{seed}"
        root.mkdir(parents=True)
        if arguments.real:
            words = (f"rollout.seed={seed}", *real_files())
            show(seed, "real-cpu", *run(root, "real", "real-cpu", *words))
            show(seed, "real-cpu, control", *run(root, "real-coin", "real-cpu", *words, *CONTROL))
            continue
        run(root, "made", "sft-cpu", "--iterations", "1", f"rollout.seed={seed}")  # makes the built-in model
        run(root, "made-too", "tool-agent-cpu", "--iterations", "1", f"rollout.seed={seed}")
        seeded = f"rollout.seed={seed}"
        show(seed, "tool-agent-cpu", *run(root, "agent", "tool-agent-cpu", seeded))
        show(seed, "tool-agent-cpu, control", *run(root, "agent-coin", "tool-agent-cpu", seeded, *CONTROL))
        show(seed, "sft-cpu", *run(root, "runs/sft", "sft-cpu", seeded))
        show(seed, "rl-after-sft-cpu", *run(root, "runs/rl", "rl-after-sft-cpu", seeded))
        control = run(root, "rl-coin", "rl-after-sft-cpu", seeded, *CONTROL)
        show(seed, "rl-after-sft-cpu, control", *control)
        for name, teacher in (
            ("distill-cpu", root / "runs/rl/checkpoints/iteration_000016"),
            ("distill-cpu, control", root / "made/base_model"),
        ):
            with served(teacher) as url:
                show(seed, name, *run(root, name, "distill-cpu", seeded, f"rollout.teacher={url}"))


def real_files() -> tuple[str, ...]:
    """Return the files of real-cpu as settings, for runs that are not in the repository."""
    sys.path.insert(0, str(RECIPES.parents[1]))
    from scripts.real_model import model_directory

    tasks, eval_tasks = RECIPES / "capitals.jsonl", RECIPES / "capitals-eval.jsonl"
    return f"model={model_directory()}", f"tasks={tasks}", f"eval_tasks={eval_tasks}"


def run(root: Path, name: str, recipe: str, *words: str) -> tuple[float, list[float]]:
    """Run a recipe with more words; return the seconds that it took, and the curve."""
    command = [sys.executable, "-m", "coordinator.cli", "--config", f"{RECIPES / recipe}.toml", *words]
    began_s = time.monotonic()
    path = os.pathsep.join([str(Path(__file__).parent), str(RECIPES.parents[1])])
    subprocess.run(
        [*command, "--log-path", name],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    took_s = time.monotonic() - began_s
    lines = Run(root / name).metrics()
    if recipe == "sft-cpu":  # what is sampled is the demonstrations
        right = [line["eval_reward"] for line in lines if line.get("eval_reward") is not None]
    else:
        right = [(line.get("sample_metrics") or {}).get("exact", line["reward"]) for line in lines]
    return took_s, [round(value, 3) for value in right]


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Serve a model with the embedded engine; its base URL."""
    argv = [sys.executable, "-m", "rollout.engines.embedded.server", "--port", "0", "--model", str(model)]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"{server.stdout.readline().split()[-1]}/v1"
    finally:
        server.terminate()
        server.wait()


def show(seed: str, recipe: str, took_s: float, right: Sequence[float]) -> None:
    """Print the line of a run."""
    line = {"recipe": recipe, "seed": int(seed), "s": round(took_s, 1), "right": right}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
