"""Measure what a policy learns from itself with the answer in its prompt, beside what it learns from rewards.

    python scripts/bench/self_distillation.py --dir DIR --seeds 0,1,2

First the built-in model is shown what a hint is: half of the demonstrations are sums behind `ANSWER;`, which
it copies; the other half are sums as it answers them anyway, mostly in brackets, which earn nothing. Prints a
JSON line for each run from there: how many of the held out sums the policy of each iteration gets right.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from coordinator import Run
from rollout.tasks.task_set import load_tasks

SHOWN = 1024
"""Demonstrations of each half."""
IN_BRACKETS = 0.8
HINT = "rollout.teacher=self:answer rollout.teacher_template={hint};{prompt}"
FROM_REWARDS = "trainer.learning_rate=1e-3 trainer.eps=0.1"
"""The settings of scripts/recipes/rl-after-sft-cpu.toml."""
ARMS = {
    "rewards": FROM_REWARDS,
    "self": f"trainer.algorithm=distill trainer.learning_rate=3e-4 {HINT}",
    "both": f"{FROM_REWARDS} trainer.kl=k1 trainer.kl_to=teacher trainer.kl_coefficient=0.1 {HINT}",
}
LEARNS = (
    "rollout.tasks_per_iteration=64 rollout.max_tokens=8 trainer.warmup_steps=5 trainer.global_batch_size=128"
)


def main() -> None:
    """Parse the command line, run all, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the runs go; new")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    arguments = parser.parse_args()
    for seed in arguments.seeds.split(","):
        root: Path = arguments.dir / f"seed_{seed}"
        root.mkdir(parents=True)
        write_demonstrations(root / "demonstrations.jsonl", int(seed))
        shown = "--iterations 40 --tasks demonstrations.jsonl --eval-interval 0 trainer.algorithm=sft"
        steps = "rollout.tasks_per_iteration=256 trainer.global_batch_size=64 trainer.learning_rate=1e-3"
        run(root, "sft", seed, shown, steps)
        sums = "--model sft/checkpoints/iteration_000040 --tasks builtin:arithmetic --iterations 8"
        sums += " --eval-interval 1 eval.temperature=1 eval.max_tasks=512"
        for name, words in ARMS.items():
            lines = run(root, name, seed, sums, LEARNS, words)
            right = [round(line["eval_reward"], 3) for line in lines if line.get("eval_reward") is not None]
            distance = [round(line["kl_reference"], 2) for line in lines] if HINT in words else []
            line = {"from": name, "seed": int(seed), "right": right, "kl_reference": distance}
            print(json.dumps(line), flush=True)


def write_demonstrations(path: Path, seed: int) -> None:
    """Write sums with and without a hint."""
    draw, lines = random.Random(seed), list[str]()
    tasks = load_tasks("builtin:arithmetic", seed=seed, split="train").tasks
    for task in draw.sample(list(tasks), SHOWN):
        prompt, answer = task["prompt"], task["answer"]
        plain = f"({answer})" if draw.random() < IN_BRACKETS else answer
        lines.append(json.dumps({"prompt": f"{answer};{prompt}", "answer": answer}))
        lines.append(json.dumps({"prompt": prompt, "answer": plain}))
    path.write_text("\n".join(lines))


def run(root: Path, name: str, seed: str, *words: str) -> list[dict[str, Any]]:
    """Run with these words; return the metrics of its iterations."""
    given = [word for text in words for word in text.split()]
    command = [sys.executable, "-m", "coordinator.cli", *given, f"rollout.seed={seed}", "--log-path", name]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    output = subprocess.DEVNULL
    subprocess.run(command, cwd=root, env=environment, check=True, stdout=output, stderr=output)
    return Run(root / name).metrics()


if __name__ == "__main__":
    main()
