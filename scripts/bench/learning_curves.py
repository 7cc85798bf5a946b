"""Measure what a model learns with some settings, beside what it learns with others.

    python scripts/bench/learning_curves.py --dir DIR --seeds 0,1,2 --arm default= \
        --arm sapo=trainer.algorithm=sapo --arm muon='trainer.optimizer=muon trainer.learning_rate=1e-3'

An arm is a name and the settings of its runs, separated by spaces. All arms have the recipe of the demo, the
settings that stand last, and the built-in model, or with --experts a mixture of as small experts that is
taught the same. --tasks mixture are the demo's sums from two sources, small (up to 99) and large; --tasks
labels are its sums with their answer, labelled good, and with that in brackets, labelled bad. Prints a JSON
line for each run, with the fraction of each iteration's samples that is right (of its evaluation, if it has
one; for labels each has); and means over the iterations of what docs/monitoring.md has about the distance of
engine and trainer.

The fraction in iterations 1, 3, 4, 6 and 10, with iterations=10, means of seeds 0, 1 and 2:

    default                                              .41 .66 .84 .94 .96
    trainer.algorithm=maxrl                              .41 .66 .84 .93 .94
    trainer.algorithm=sapo                               .41 .66 .84 .93 .94
    trainer.algorithm=gmpo                               .41 .67 .84 .92 .94
    trainer.algorithm=dppo                               .41 .67 .84 .93 .95
    trainer.entropy_target=0.2                           .41 .66 .84 .93 .97
    trainer.optimizer=muon trainer.learning_rate=1e-3    .41 .58 .73 .90 .95
    trainer.lora.rank=16 trainer.learning_rate=3e-3      .41 .76 .87 .94 .97
      trainer.lora.base_dtype=nf4                        .41 .75 .89 .87 .95    kl_engine .004 to .013
    tiny.warmup_steps=300                                .14 .23 .25 .27 .27
      trainer.algorithm=maxrl                            .14 .23 .20 .25 .27
    --experts, compute_dtype and engine.dtype=bfloat16   .40 .65 .81 .90 .94    kl_engine 1e-5 to 3e-5
      trainer.routing_replay=true                        .40 .65 .81 .90 .93    the same
    trainer.algorithm=grpo trainer.kl=off, two rewards   .41 .65 .81 .92 .96    exact=0.5 + numeric=0.5
      trainer.algorithm=gdpo                             .41 .63 .78 .92 .96
    --tasks mixture                                      .41 .66 .84 .94 .96
      trainer.sources.large.weight=2                     .41 .67 .83 .95 .96
      trainer.sources.large.algorithm=gspo               .41 .64 .80 .92 .96
    --tasks labels trainer.algorithm=kto                 .00 .39 .91 1.0 .90    greedy, of its evaluation
      trainer.algorithm=rft rollout.environment=labelled .00 .36 .89 1.0 1.0

So none learns more than the default here, and a route that is replayed changes nothing where kl_engine is
small. With one of the seeds KTO goes on beyond what its labels say, and falls from 1.0 to .71.

SmolLM2-135M in 4 bits (trainer.lora.rank=16 trainer.lora.base_dtype=nf4) has a kl_engine of 0.59, and 0.26
effective_samples, on two iterations of scripts/recipes/capitals.jsonl with 16 tasks:

    model=build/real/SmolLM2-135M-Instruct tasks=scripts/recipes/capitals.jsonl iterations=2
    rollout.tasks_per_iteration=16 trainer.global_batch_size=128 engine.dtype=float32
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from coordinator import Run
from coordinator.settings.loading import TINY_DEFAULTS
from rollout.tasks.task_set import load_tasks

SHARED = {
    **TINY_DEFAULTS,
    "tasks": "builtin:arithmetic",
    "rollout.tasks_per_iteration": 64,
    "eval.interval": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
APART = ("kl_engine", "effective_samples", "mismatch_max")


def main() -> None:
    """Parse the command line, run all, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the runs go; new")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument(
        "--arm", action="append", default=[], metavar="NAME=SETTINGS", help="several, in turn"
    )
    parser.add_argument("--experts", action="store_true", help="a mixture of experts as the model")
    parser.add_argument("--tasks", choices=("mixture", "labels"), help="in place of the demo's")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of all runs")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True)
    arms = [arm.partition("=") for arm in arguments.arm]
    for seed in map(int, arguments.seeds.split(",")):
        shared = {**SHARED, "rollout.seed": seed, **settings_of(arguments.words)}
        if arguments.tasks:
            shared["tasks"] = str(
                write_tasks(seed, arguments.dir.absolute() / f"tasks_{seed}.jsonl", arguments.tasks)
            )
        if arguments.tasks == "labels":
            shared |= {"eval_tasks": SHARED["tasks"], "eval.interval": 1}
        if arguments.experts:
            shared["model"] = str(make_experts(seed, arguments.dir.absolute() / f"experts_{seed}"))
        for name, _, words in arms:
            lines = learn(arguments.dir / f"{name}_{seed}", {**shared, **settings_of(words.split())})
            means = {each: mean_of([line[each] for line in lines]) for each in APART}
            right = [round(right_of(line), 2) for line in lines]
            print(json.dumps({"arm": name, "seed": seed, "right": right, **means}), flush=True)


def right_of(line: Mapping[str, Any]) -> float:
    """Return the fraction of the samples that is right: of several rewards what `exact` says."""
    if (evaluated := line.get("eval_reward")) is not None:
        return evaluated
    return (line.get("sample_metrics") or {}).get("exact", line["reward"])


def write_tasks(seed: int, path: Path, kind: str) -> Path:
    """Write the demo's sums as a file of a mixture or of labelled answers."""
    rows: list[dict[str, Any]] = []
    for task in load_tasks(SHARED["tasks"], seed=seed, split="train").tasks:
        source = "large" if len(task["answer"]) > 2 else "small"
        if kind == "mixture":
            rows.append({**task, "source": source})
        else:
            bad = {"completion": f"({task['answer']})", "label": False}
            asked = {"prompt": task["prompt"]}
            rows += [{**asked, "completion": task["answer"], "label": True}, {**asked, **bad}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean, in two digits, of the iterations that have trained."""
    there = [value for value in values if value is not None]
    return float(f"{statistics.mean(there):.2g}") if there else None


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Return KEY=VALUE words by name."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def learn(directory: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run to the end; return the metrics of the iterations. Raises RuntimeError with the output."""
    run = Run.start(directory, settings)
    if (outcome := run.wait()) != "finished":
        raise RuntimeError(f"{directory} has {outcome}: {run.output()[-2000:]}")
    return run.metrics()


def make_experts(seed: int, directory: Path, steps: int = 800) -> Path:
    """Write a mixture of experts with the shape of the built-in model, taught as that one is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.model import tiny

    dense = tiny.make_model(seed)  # which seeds torch
    shape = dense.config.to_dict() | {"architectures": None}
    del shape["model_type"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **shape, **EXPERTS))
    model.generation_config, tokenizer = dense.generation_config, tiny.make_tokenizer()
    with redirect_stdout(sys.stderr):
        tiny.warm_up(model, tokenizer, SHARED["tasks"], seed, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
