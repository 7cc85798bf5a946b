"""Compare training tokens per second with TRL, on one batch of sequences of very different lengths.

    .venv-trl/bin/python scripts/bench/train_step.py [--lengths uniform log-uniform] [--rounds 3]
    .venv/bin/python scripts/bench/train_step.py --against own-attention [--longest 512]
    .venv-trl/bin/python scripts/bench/train_step.py --prompt-tokens 256 --samples 8 --longest 128
    .venv-trl/bin/python scripts/bench/train_step.py --gpu [--shapes 0.6b 1.7b]

Prints one JSON line. Both sides take the same optimizer steps (GRPO, one update per batch, AdamW, float32
weights) on the same sequences with the same advantages, in separate processes that take turns. A sequence has
16 to 1,024 tokens (`--longest`), of which 8 are the prompt; a longer prompt is added to them. `tokens_per_s`
counts tokens without padding, and a shared prompt once per sample; a ratio is the median over the rounds.
`memory_peak_mb` is the most memory of such a process, `memory_before_mb` its memory before the first step.
`padding` is the fraction of the rows that holds no token; `masked` the fraction of Flagpost's pairs of a
token and one before it in its row that belong to different sequences, so that a mask hides them, or
`attention` leaves them out: what computes the microbatches' attention (trainer/model/attention.py), and how
many of them. `--against own-attention` compares with the attention that transformers chose for the model.
Flagpost packs sequences, and computes a prompt once if several samples have it. TRL 1.16 has no padding-free
path for GRPO: it pads all sequences to the longest one; the fastest size of its microbatches
(`--trl-microbatch`, in sequences) counts.

On a GPU: a Qwen3 of the shape, bfloat16 autocast over float32 weights on both sides, 16,384 tokens per
microbatch. `mfu`: 6 x parameters x tokens, and attention, as a fraction of --peak-tflops.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from elsewhere import Elsewhere
from training_data import (
    LEAST_PROMPT_TOKENS,
    LONGEST,
    SHAPES,
    draw_lengths,
    draw_sequences,
    flops_of,
    make_batch,
    make_model,
    parameters,
)
from trl_trainer import need_trl

if TYPE_CHECKING:
    from trainer.batch.packing import Microbatch

TURN_TIMEOUT_S = 1800.0
LEARNING_RATE = 1e-6


# In a separate process.


def ours(options: argparse.Namespace, output_dir: Path) -> list[tuple[float, float]]:
    """Train with Flagpost; return (wall, CPU) seconds of the steps except the first."""
    import torch

    from trainer.batch.packing import plan_step
    from trainer.model.learner import build_learner
    from trainer.settings import TrainerSettings
    from trainer.update.step import train

    token_ids, advantages = draw_sequences(options)
    count = len(token_ids)
    batch = make_batch(options.shape, token_ids, advantages, options.prompt_tokens)
    device = torch.device("cuda" if options.gpu else "cpu")
    settings = TrainerSettings(
        global_batch_size=count, learning_rate=LEARNING_RATE, max_tokens_per_microbatch=options.microbatch
    )
    learner = build_learner(options.model, device, settings)
    if options.side == "own-attention":
        learner.arrangement = replace(learner.arrangement, kernels={})
    note_memory(options)
    plan = plan_step(batch, range(count), [1.0], 0, options.microbatch, learner.arrangement.packing)
    options.padding = 1 - sum(one.tokens for one in plan) / sum(one.token_ids.size for one in plan)
    options.masked = masked_fraction(plan)
    options.attention = dict(Counter(learner.kernel(one).value for one in plan))
    seconds: list[tuple[float, float]] = []
    for _step in range(1 + options.steps):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        stats = train(learner, batch, settings, max_tokens=LONGEST, report=lambda _line: None)
        if options.gpu:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
        assert len(stats) == 1
    return seconds[1:]


def masked_fraction(plan: "list[Microbatch]") -> float:
    """Return the fraction of the pairs of a token and one before it in its row that the token
    must not see.
    """
    hidden = pairs = 0
    for one in plan:
        own, before = (
            one.segments if one.segments is not None else [np.cumsum(one.position_ids == 0, axis=1)] * 2
        )
        for mine, shared in zip(own, before, strict=True):
            sees = np.tril((mine[:, None] == mine) | (shared[:, None] == mine))
            pairs += len(mine) * (len(mine) + 1) // 2
            hidden += len(mine) * (len(mine) + 1) // 2 - int(sees.sum())
    return hidden / pairs


def trl(options: argparse.Namespace, output_dir: Path) -> list[tuple[float, float]]:
    """Train with TRL; return (wall, CPU) seconds of the steps except the first."""
    import torch
    import trl_trainer

    token_ids, advantages = draw_sequences(options)
    prompt_tokens = options.prompt_tokens
    count, width = len(token_ids), max(map(len, token_ids)) - prompt_tokens
    completions, mask = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width)
    for row, ids in enumerate(token_ids):
        completions[row, : len(ids) - prompt_tokens] = torch.from_numpy(ids[prompt_tokens:])
        mask[row, : len(ids) - prompt_tokens] = 1
    device = torch.device("cuda" if options.gpu else "cpu")
    batch = {
        "prompt_ids": torch.tensor(np.stack([ids[:prompt_tokens] for ids in token_ids])).long(),
        "prompt_mask": torch.ones(count, prompt_tokens, dtype=torch.long),
        "completion_ids": completions,
        "completion_mask": mask.long(),
        "advantages": torch.from_numpy(advantages),
        "num_items_in_batch": mask.sum(),
    }
    note_memory(options)
    options.padding = 1 - sum(map(len, token_ids)) / (count * (width + prompt_tokens))
    seconds, _metrics = trl_trainer.train(
        options.model,
        [{"prompt": "1+1="}] * (2 * count),
        lambda completions, **_: [0.0] * len(completions),
        output_dir,
        {name: tensor.to(device) for name, tensor in batch.items()},
        use_cpu=not options.gpu,
        bf16=options.gpu,
        per_device_train_batch_size=options.microbatch,
        gradient_accumulation_steps=count // options.microbatch,
        num_generations=8,
        max_completion_length=LONGEST,
        max_steps=1 + options.steps,
        learning_rate=LEARNING_RATE,
    )
    return seconds


def note_memory(options: argparse.Namespace) -> None:
    """Note the memory before the first step: the libraries and, for Flagpost, the model."""
    options.memory_before_mb = round(psutil.Process().memory_info().rss / 1e6)


def take_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Take one turn of a side in this process."""
    import torch

    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as output_dir:
        watch = Elsewhere()
        seconds = {"ours": ours, "own-attention": ours, "trl": trl}[options.side](options, Path(output_dir))
        elsewhere = watch.cores()
    peak = torch.cuda.max_memory_allocated() if options.gpu else _high_water()
    return {
        "seconds": statistics.median(wall for wall, _cpu in seconds),
        "cpu_s": statistics.median(cpu for _wall, cpu in seconds),
        "memory_peak_mb": round(peak / 1e6),
        "memory_before_mb": options.memory_before_mb,
        "padding": options.padding,
        "masked": getattr(options, "masked", None),
        "attention": getattr(options, "attention", None),
        "cores_busy_elsewhere": elsewhere,
    }


def _high_water() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# The turns.


def turn(options: argparse.Namespace, side: str, microbatch: int, steps: int, **more: Any) -> dict[str, Any]:
    """Call `take_turn` in a separate process; if it fails, end the benchmark with its last words."""
    said = {"side": side, "microbatch": microbatch, "steps": steps, "gpu": options.gpu, **more}
    argv = [sys.executable, __file__, "--turn", json.dumps(said)]
    made = subprocess.run(argv, capture_output=True, text=True, timeout=TURN_TIMEOUT_S, check=False)
    if made.returncode != 0:
        raise SystemExit(f"{side}, microbatches of {microbatch}:\n{made.stderr[-3000:]}")
    return json.loads(made.stdout.splitlines()[-1])


def compare(options: argparse.Namespace, shape: str, kind: str, model: Path) -> dict[str, Any]:
    """Measure one row: the sides take turns; another one begins each round."""
    lengths = draw_lengths(kind, options)
    more = {"model": str(model), "shape": shape, "tokens": lengths.tolist()}
    more |= {"prompt_tokens": options.prompt_tokens, "samples": options.samples}
    other = options.against
    sizes, tried = {"ours": options.microbatch, other: options.microbatch}, {}
    if other == "trl":
        tried = {size: turn(options, "trl", size, 1, **more)["seconds"] for size in options.trl_microbatch}
        sizes["trl"] = min(tried, key=lambda size: tried[size])
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], other: []}
    for number in range(options.rounds):
        for side in ("ours", other) if number % 2 == 0 else (other, "ours"):
            turns[side].append(turn(options, side, sizes[side], options.steps, **more))
            print(f"{shape} {kind} {side}: {turns[side][-1]}", file=sys.stderr)
    tokens = int(lengths.sum())
    flops = flops_of(shape, lengths)
    row: dict[str, Any] = {"shape": shape, "lengths": kind, "sequences": len(lengths), "tokens": tokens}
    for side, made in turns.items():
        seconds = [one["seconds"] for one in made]
        row[side] = {
            "tokens_per_s": round(tokens / statistics.median(seconds)),
            "tokens_per_s_range": [round(tokens / max(seconds)), round(tokens / min(seconds))],
            "tokens_per_cpu_s": round(tokens / statistics.median(one["cpu_s"] for one in made)),
            "microbatch": sizes[side],
            "memory_peak_mb": max(one["memory_peak_mb"] for one in made),
            "memory_before_mb": max(one["memory_before_mb"] for one in made),
            "padding": round(made[0]["padding"], 3),
        }
        if made[0]["masked"] is not None:
            row[side]["masked"] = round(made[0]["masked"], 3)
            row[side]["attention"] = made[0]["attention"]
        if options.gpu:
            row[side]["mfu"] = round(flops / statistics.median(seconds) / (1e12 * options.peak_tflops), 3)
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(turns["ours"], turns[other], strict=True)]
    name = f"ours_of_{other.replace('-', '_')}"
    row[name] = round(statistics.median(ratios), 3)
    row[f"{name}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    if tried:
        row["trl_seconds_by_microbatch"] = {str(size): round(seconds, 3) for size, seconds in tried.items()}
    row["cores_busy_elsewhere"] = statistics.median(
        one["cores_busy_elsewhere"] for made in turns.values() for one in made
    )
    return row


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], help="default: 10m; on a GPU 0.6b 1.7b")
    parser.add_argument("--lengths", nargs="+", default=["uniform", "log-uniform"])
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens, but for the prompt beyond 8")
    parser.add_argument("--prompt-tokens", type=int, default=LEAST_PROMPT_TOKENS)
    parser.add_argument("--samples", type=int, default=1, help="with one prompt")
    parser.add_argument("--sequences", type=int, help="a multiple of 8; default: 32, on a GPU 256")
    parser.add_argument("--microbatch", type=int, help="Flagpost's, in tokens; default: 8192, on a GPU 16384")
    parser.add_argument("--trl-microbatch", type=int, nargs="+", help="default: 2 8 32, on a GPU 8 16 32")
    parser.add_argument("--steps", type=int, default=3, help="of a turn, after one that does not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", choices=["trl", "own-attention"], default="trl")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU; default: an H200's")
    parser.add_argument("--turn", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.turn["side"] if options.turn else options.against) == "trl":
        need_trl(parser)
    if options.turn:
        given = argparse.Namespace(**options.turn)
        given.model, given.tokens = Path(given.model), np.array(given.tokens)
        print(json.dumps(take_turn(given)))
        return
    options.shapes = options.shapes or (["0.6b", "1.7b"] if options.gpu else ["10m"])
    options.sequences = options.sequences or (256 if options.gpu else 32)
    options.microbatch = options.microbatch or (16_384 if options.gpu else 8192)
    options.trl_microbatch = options.trl_microbatch or ([8, 16, 32] if options.gpu else [2, 8, 32])
    rows = []
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        for shape in options.shapes:
            model = make_model(shape, Path(directory) / shape)
            rows += [compare(options, shape, kind, model) for kind in options.lengths]
    print(json.dumps({"cores": os.cpu_count(), "parameters": _counts(options.shapes), "rows": rows}))


def _counts(shapes: list[str]) -> dict[str, float]:
    return {shape: round(parameters(shape) / 1e6, 1) for shape in shapes}


if __name__ == "__main__":
    main()
