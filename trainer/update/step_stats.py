"""What optimizer steps measure, and the metrics of a training phase that are made of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch.batch import Batch
from trainer.peers import waiting_for_peers
from trainer.settings import TrainerSettings
from trainer.statistics import BY_SOURCE, STATS, WEIGHTS


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, the same on every rank but for `padding` and `by_source`."""

    loss: float
    kl_engine: float
    clip_fraction: float
    kl_reference: float
    entropy: float
    correction_fraction: float
    weight: float
    weight_squared: float
    mismatch_max: float
    """Largest |log pi_old - log mu_engine| of a token."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Prompts included."""
    trained_tokens: int
    padding: float
    """Fraction of this rank's rows that holds no token."""
    seconds: float
    entropy_bonus: float | None = None
    """The weight that the step had; None: it is fixed."""
    by_source: Tensor | None = None
    """(1 + len(BY_SOURCE), sources) of this rank: tokens of each source, sums over them; None: it is one."""
    margin: float | None = None
    """The margin of `preferences.Preferences`; None without pairs."""
    preferred: float | None = None


def by_source(stats: Sequence[StepStats], batch: Batch, settings: TrainerSettings) -> dict[str, float]:
    """Return the metrics of each source of tasks, e.g. `loss_by_source.math`: means over its trained tokens
    of all steps. All ranks call this together.
    """
    if not batch.source_names or not stats:
        return {}
    sums = torch.stack([step.by_source for step in stats if step.by_source is not None]).sum(0).cpu()
    if dist.is_initialized():  # a group counts its tokens as often as it has ranks, which cancels out
        with waiting_for_peers("adding up what sources show"):
            dist.all_reduce(sums)
    tokens, *totals = sums.tolist()
    metrics: dict[str, float] = {}
    for name, of_sources in zip(BY_SOURCE, totals, strict=True):
        for source, total, count in zip(batch.source_names, of_sources, tokens, strict=True):
            if count and not (name == "loss" and settings.weighs_samples):  # there it is no mean over tokens
                metrics[f"{name}_by_source.{source}"] = total / count
    return metrics


def summary(stats: Sequence[StepStats], sequences: int, lr: float, seconds: float) -> dict[str, float]:
    """Return a phase's metrics: means weighted by trained tokens, except `grad_norm`, a plain mean over the
    steps, and `mismatch_max`, the largest.

    `effective_samples`: (mean w)^2 / mean w^2 over the tokens, w = pi_old / mu, the effective sample size
    (Kong 1992) as a fraction; 1 if the engine sampled with the policy itself.

    Where no step was taken, nothing of the policy was measured: only `lr` is given, `sequences` and the time.
    `seconds` is the whole phase.
    """
    trained = sum(step.trained_tokens for step in stats)
    tokens = sum(step.tokens for step in stats)
    amounts = {
        "lr": stats[-1].lr if stats else lr,
        "tokens": float(tokens),
        "sequences": float(sequences),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "seconds": seconds,
    }
    if not stats:
        return amounts

    def mean(name: str) -> float:
        return sum(getattr(step, name) * step.trained_tokens for step in stats) / max(1, trained)

    squared = mean("weight_squared")
    return {
        "loss": mean("loss"),
        "grad_norm": sum(step.grad_norm for step in stats) / len(stats),
        "mismatch_max": max(step.mismatch_max for step in stats),
        "entropy": mean("entropy"),
        **{name: mean(name) for name in STATS if name not in WEIGHTS},
        **({"effective_samples": mean("weight") ** 2 / squared} if squared else {}),
        "padding": mean("padding"),
        **{
            name: mean(name)
            for name in ("margin", "preferred", "entropy_bonus")
            if getattr(stats[0], name) is not None
        },
        **amounts,
    }


def step_line(step: int, steps: int, done: StepStats, reward: float) -> str:
    """Return the line of the log for a step of several; `reward`: the batch's mean."""
    return (
        f"step {step}/{steps} | loss {done.loss:.4f} | reward {reward:.2f} | norm {done.grad_norm:.2f} "
        f"| lr {done.lr:.1e} | {done.seconds:.2f} s | {done.tokens / done.seconds:,.0f} tok/s"
    )
