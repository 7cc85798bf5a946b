"""TRL's GRPOTrainer for the benchmarks, with the settings that are fastest here."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

NOTHING_BESIDES: dict[str, Any] = {
    "activation_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "num_iterations": 1,
    "beta": 0.0,
    "lr_scheduler_type": "constant",
}
"""No logging, no saving, no reference model; activations are kept, one update per batch."""


def need_trl(parser: argparse.ArgumentParser) -> None:
    """End with a line that says what to do if TRL is not installed."""
    if find_spec("trl") is None:
        parser.error("TRL is not installed for this Python; make test-trl, then .venv-trl/bin/python")


def train(
    model_dir: Path,
    rows: Sequence[Mapping[str, Any]],
    reward: Callable[..., list[float]],
    output_dir: Path,
    batch: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Train the float32 model of `model_dir` on `rows`; return (wall, CPU) seconds, last metrics.

    The seconds of a step begin with the end of the step before, so the first has none. `batch`: what to train
    on in every step, instead of generating and scoring.
    """
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    ends: list[tuple[float, float]] = []

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return super()._generate_and_score_completions(inputs) if batch is None else dict(batch)

    trainer: Any = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output_dir), **{**NOTHING_BESIDES, **settings}),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        callbacks=[Times()],
    )
    trainer.train()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
    seconds = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(ends)]
    return seconds, metrics or dict(trainer.state.log_history[-1])
