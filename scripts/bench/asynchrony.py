"""Measure what --max-async-level does to learning: the demo with several levels and seeds, in two crews.

Each run's last checkpoint solves the 512 tasks that are held out: twice each at temperature 1, and once
greedily, as the demo evaluates. Level 0 runs in one crew, the others with two nodes that generate and one
that trains. Prints a JSON line for each run, then one with the means of each level.

    python scripts/bench/asynchrony.py --levels 0,1,3 --seeds 0,1,2 --dir /tmp/asynchrony
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from coordinator import Run

NODES = ("--num-nodes", "3")
CREWS = ("--place", "rollout=0-1", "--place", "train=2")
EVALUATION = (
    "--rl-phase",
    "rollout",
    "--rollout-split",
    "eval-only",
    "--iterations",
    "1",
    "rollout.max_tokens=8",
)
HELD_OUT = {
    "sampled": ("eval.samples_per_task=2", "eval.temperature=1"),
    "greedy": ("eval.samples_per_task=1", "eval.temperature=0"),
}


def run(*words: str) -> None:
    """Run `run` with these words to its end; CalledProcessError if it fails."""
    command = [sys.executable, "-m", "coordinator.cli", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(root: Path, level: int, seed: int, words: list[str]) -> dict[str, float]:
    """Train, with more `words` for `run`, evaluate, and return the line."""
    name, seeded = f"level_{level}_seed_{seed}", f"rollout.seed={seed}"
    trained = root / name
    more = (*CREWS, "--max-async-level", str(level)) if level else ()
    run("local", *NODES, *more, *words, seeded, "--log-path", str(trained))
    lines = Run(trained).metrics()
    checkpoint = trained / "checkpoints" / f"iteration_{lines[-1]['iteration']:06d}"
    found: dict[str, float] = {}
    for how, settings in HELD_OUT.items():
        evaluated = root / f"{name}_{how}"
        how_to = (*EVALUATION, *settings, seeded, "--log-path", str(evaluated))
        run("--master", "--model", str(checkpoint), *how_to)
        (line,) = Run(evaluated).metrics()
        found[how] = line["eval_reward"]
    return {"level": level, "seed": seed, "reward": lines[-1]["reward"], **found}


def main() -> None:
    """Measure every level with every seed, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", default="0,1,3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dir", type=Path, required=True, help="a directory that is not there yet")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of the runs that train")
    options = parser.parse_args()
    options.dir.mkdir(parents=True)
    found: list[dict[str, float]] = []
    for seed in map(int, options.seeds.split(",")):
        for level in map(int, options.levels.split(",")):
            found.append(measure(options.dir.absolute(), level, seed, options.words))
            print(json.dumps(found[-1]), flush=True)
    for level in sorted({line["level"] for line in found}):
        of = [line for line in found if line["level"] == level]
        means = {name: round(statistics.mean(line[name] for line in of), 4) for name in ("reward", *HELD_OUT)}
        print(json.dumps({"level": level, **means}))


if __name__ == "__main__":
    main()
