"""Compare an iteration with a real chat model, of one node and of three, with a step of TRL's GRPOTrainer.

    .venv-trl/bin/python scripts/bench/real.py [--rounds 1] [--iterations 4] [--dtype bfloat16]

Prints a JSON line. The model is that of scripts/real_model.py, with 135 M parameters, the tasks are those of
the recipe real-cpu, 16 x 8 samples of at most 24 tokens; the reward is the share of capital letters, so that
every group has an advantage. Flagpost: `run local` with the embedded engine, from the start of an iteration
to the start of the next, every trajectory and checkpoint durable, and the optimizer's state of each second
one. TRL: one process that saves nothing, from
the end of one step to the end of the next, with transformers' generate. Both: one optimizer step of 128
samples, layers in float32, or with --dtype bfloat16 in that (TRL: by autocast) over float32 weights. They
take turns; of each the median after the first iteration counts.

`peak_gb`: the most memory that all processes of a turn had together, shared pages counted once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from elsewhere import Elsewhere
from iteration import iteration_seconds
from trl_trainer import need_trl, train

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = REPOSITORY / "scripts" / "recipes" / "capitals.jsonl"
PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 24
LEARNING_RATE = 1e-6
NODES = (1, 3)
LOOK_S = 0.5


def capitals(task: dict[str, Any], completion: str) -> float:
    """Return the share of capital letters in all that is written."""
    return sum(letter.isupper() for letter in completion) / (1 + len(completion))


def flagpost(model: Path, root: Path, nodes: int, iterations: int, dtype: str) -> dict[str, Any]:
    """Take a turn of `nodes` nodes; return the seconds of its iterations, and its memory."""
    settings = {
        "model": model,
        "tasks": TASKS,
        "iterations": iterations,
        "rollout.tasks_per_iteration": PROMPTS,
        "rollout.samples_per_task": SAMPLES,
        "rollout.max_tokens": MAX_TOKENS,
        "rollout.reward": "real:capitals",
        "engine.dtype": dtype,
        "trainer.compute_dtype": "bfloat16" if dtype == "bfloat16" else "auto",
        "eval.interval": 0,
        "trainer.global_batch_size": PROMPTS * SAMPLES,
        "trainer.learning_rate": LEARNING_RATE,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "coordinator.cli",
        "local",
        "--num-nodes",
        str(nodes),
        "--engine",
        "torch",
    ]
    made = turn([*command, "--log-path", str(root), *words])
    return {"seconds": iteration_seconds(root, 1), "peak_gb": made["peak_gb"]}


def trl(model: Path, iterations: int, microbatch: int, dtype: str) -> dict[str, Any]:
    """Take a turn of TRL in a process of its own."""
    words = [str(model), str(iterations), str(microbatch), dtype]
    made = turn([sys.executable, __file__, "--trl-turn", *words])
    return {"seconds": json.loads(made["text"].splitlines()[-1]), "peak_gb": made["peak_gb"]}


def trl_turn(model: Path, iterations: int, microbatch: int, dtype: str) -> list[float]:
    """Take TRL's steps in this process; return the seconds of all but the first."""
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    rows = [{"prompt": tasks[k % len(tasks)]["messages"]} for k in range(PROMPTS * (iterations + 1))]

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [capitals({}, messages[-1]["content"]) for messages in completions]

    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as output_dir:
        seconds, _ = train(
            model,
            rows,
            reward,
            Path(output_dir),
            use_cpu=True,
            bf16=dtype == "bfloat16",
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=PROMPTS * SAMPLES // microbatch,
            num_generations=SAMPLES,
            max_completion_length=MAX_TOKENS,
            max_steps=iterations,
            learning_rate=LEARNING_RATE,
        )
    return [wall for wall, _ in seconds]


def turn(argv: list[str]) -> dict[str, Any]:
    """Run a process; return what it prints, and how much memory it and its children had at most."""
    path = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    with (
        subprocess.Popen(
            argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
        _peak(process.pid) as peak,
    ):
        text, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}\n{text[-4000:]}")
    return {"text": text, "peak_gb": round(max(peak, default=0) / 1e9, 2)}


@contextmanager
def _peak(pid: int) -> Iterator[list[int]]:
    """Measure the memory of a process and its children during a block, again and again."""
    ended, measured = threading.Event(), list[int]()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            total = 0
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                for process in [parent, *parent.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        total += process.memory_full_info().pss
            measured.append(total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield measured
    finally:
        ended.set()
        thread.join()


def measure(options: argparse.Namespace, model: Path, directory: Path) -> dict[str, Any]:
    """Take all turns and return the line."""
    watch, made = Elsewhere(), dict[str, list[dict[str, Any]]]()
    for number in range(options.rounds):
        made.setdefault("trl", []).append(
            trl(model, options.iterations, options.trl_microbatch, options.dtype)
        )
        for nodes in NODES:
            root = directory / f"round{number}.nodes{nodes}"
            ours = flagpost(model, root, nodes, options.iterations, options.dtype)
            made.setdefault(f"nodes_{nodes}", []).append(ours)
        for name, turns in made.items():
            print(f"round {number + 1}, {name}: {turns[-1]}", file=sys.stderr)
    seconds = {name: [statistics.median(one["seconds"]) for one in turns] for name, turns in made.items()}
    line: dict[str, Any] = {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "dtype": options.dtype,
    }
    for name, of_turns in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(of_turns, seconds["trl"], strict=True)]
        line[name] = {
            "s": round(statistics.median(of_turns), 2),
            "of_trl": round(statistics.median(ratios), 3),
            "peak_gb": max(one["peak_gb"] for one in made[name]),
        }
    return {**line, "cores": os.cpu_count(), "cores_busy_elsewhere": watch.cores()}


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("/tmp"), help="on a local disk; default: /tmp")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=4, help="of a turn; the first does not count")
    parser.add_argument("--trl-microbatch", type=int, default=32, help="samples")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", type=Path, help="default: that of scripts/real_model.py")
    parser.add_argument("--trl-turn", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.iterations < 3:
        parser.error(f"--iterations {options.iterations}: of two none is left to count; give 3 or more")
    need_trl(parser)
    if options.trl_turn:
        model, iterations, microbatch, dtype = options.trl_turn
        print(json.dumps(trl_turn(Path(model), int(iterations), int(microbatch), dtype)))
        return
    sys.path.insert(0, str(REPOSITORY))
    from scripts.real_model import model_directory

    model = options.model or model_directory()
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as directory:
        print(json.dumps(measure(options, model, Path(directory))))


if __name__ == "__main__":
    main()
