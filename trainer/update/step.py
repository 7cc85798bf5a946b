"""Train on a batch: optimizer steps, on all ranks together."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch, plan_step, split_steps
from trainer.model.model import Learner
from trainer.progress import Progress
from trainer.settings import TrainerSettings
from trainer.statistics import STATS
from trainer.update.loss import Totals, policy_loss


class TrainingDiverged(RuntimeError):
    """A loss or gradient is not a finite number; the weights have not taken the step."""


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, the same on every rank but for `padding`."""

    loss: float
    kl_engine: float
    clip_fraction: float
    kl_reference: float
    entropy: float
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Prompts included."""
    trained_tokens: int
    padding: float
    """Fraction of this rank's rows that holds no token."""
    seconds: float


def train(
    learner: Learner,
    batch: Batch,
    settings: TrainerSettings,
    *,
    temperature: float,
    max_tokens: int,
    rank_weights: Sequence[float] = (1.0,),
    report: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> list[StepStats]:
    """Train on every sequence of `batch` once; `report` gets a line for each optimizer step.

    The batch was sampled at `temperature`; `max_tokens` is the longest completion that could be sampled.
    `rank_weights`: one per global rank; a rank's share of the tokens follows its weight. `progress` advances
    with each microbatch that has passed through the model.

    All ranks call this with the same arguments, and do the same number of steps; the result does not depend
    on the number of ranks or their weights. An empty batch takes no step. With settings.kl a reference must
    have been loaded (Learner.load_reference). Raises TrainingDiverged.
    """
    steps = split_steps(len(batch), settings.global_batch_size)
    if not steps:
        report("no step: the batch is empty, no group of this iteration has an advantage; the weights stay")
        return []
    layout = learner.layout
    weights = layout.data_weights(rank_weights)
    plans = [
        plan_step(
            batch,
            step,
            weights,
            layout.data_rank,
            settings.max_tokens_per_microbatch,
            learner.arrangement.packing,
        )
        for step in steps
    ]
    progress = progress or Progress()
    progress.expect(sum(len(plan) for plan in [*plans, *plans[1:]]))
    # Several updates: pi_old is the policy before the first one. For the first step that is the policy
    # itself.
    old_logprobs: list[list[Tensor | None]] = [[None] * len(plans[0])]
    for plan in plans[1:]:
        old_logprobs.append([])
        for microbatch in plan:
            with torch.no_grad():
                old_logprobs[-1].append(learner.logprobs(microbatch, temperature)[0])
            progress.advance()
    stats = []
    for k, (step, plan, old) in enumerate(zip(steps, plans, old_logprobs, strict=True)):
        begin, end = int(batch.offsets[step.start]), int(batch.offsets[step.stop])
        totals = Totals(int(batch.loss_mask[begin:end].sum()), len(step), max_tokens)
        done = _optimizer_step(learner, plan, old, totals, end - begin, settings, temperature, progress)
        stats.append(done)
        report(_step_line(k + 1, len(steps), done, batch.counts.reward))
    return stats


def _optimizer_step(
    learner: Learner,
    plan: Sequence[Microbatch],
    old_logprobs: Sequence[Tensor | None],
    totals: Totals,
    tokens: int,
    settings: TrainerSettings,
    temperature: float,
    progress: Progress,
) -> StepStats:
    """Accumulate the microbatches' gradients, sum them over the ranks, clip, and let AdamW step."""
    started = time.perf_counter()
    learner.zero_sums()
    for microbatch, old in zip(plan, old_logprobs, strict=True):
        _accumulate(learner, microbatch, old, totals, settings, temperature)
        progress.advance()
    (loss, *statistics, entropy), norm = learner.add_up()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingDiverged(
            f"optimizer step {learner.optimizer_step + 1}: loss {loss}, gradient norm {norm}; "
            "lower trainer.learning_rate, or look for broken logprobs in the batch"
        )
    learner.scale_gradients(min(1.0, settings.clip_norm / (norm + 1e-6)))
    lr = learner.apply(settings)
    return StepStats(
        loss=loss,
        **dict(zip(STATS, statistics, strict=True)),
        entropy=entropy,
        grad_norm=norm,
        lr=lr,
        tokens=tokens,
        trained_tokens=totals.tokens,
        padding=1 - sum(one.tokens for one in plan) / max(1, sum(one.token_ids.size for one in plan)),
        seconds=time.perf_counter() - started,
    )


def _accumulate(
    learner: Learner,
    microbatch: Microbatch,
    old_logprobs: Tensor | None,
    totals: Totals,
    settings: TrainerSettings,
    temperature: float,
) -> None:
    """Add a microbatch's gradients and statistics to its step's."""
    if not len(microbatch.targets) and not learner.layout.sharded:
        return
    reference = learner.reference_logprobs(microbatch, temperature) if settings.kl != "off" else None
    logprobs, entropy = learner.logprobs(microbatch, temperature)
    loss, loss_stats = policy_loss(
        logprobs,
        logprobs if old_logprobs is None else old_logprobs,
        torch.from_numpy(microbatch.engine_logprobs).to(learner.device),
        reference,
        torch.from_numpy(microbatch.advantages).to(learner.device),
        torch.from_numpy(microbatch.sequences).to(learner.device),
        totals,
        settings,
    )
    loss.backward()
    learner.sums.add_(torch.cat([loss.detach()[None], loss_stats, entropy.sum()[None] / totals.tokens]))


def summary(stats: Sequence[StepStats], sequences: int, lr: float, seconds: float) -> dict[str, float]:
    """A phase's metrics: means weighted by trained tokens, except `grad_norm`, a plain mean over the steps.

    `lr` stands in where no step was taken; `seconds` is the whole phase.
    """
    trained = sum(step.trained_tokens for step in stats)
    tokens = sum(step.tokens for step in stats)

    def mean(name: str) -> float:
        return sum(getattr(step, name) * step.trained_tokens for step in stats) / max(1, trained)

    return {
        "loss": mean("loss"),
        "grad_norm": sum(step.grad_norm for step in stats) / max(1, len(stats)),
        "lr": stats[-1].lr if stats else lr,
        "entropy": mean("entropy"),
        **{name: mean(name) for name in STATS},
        "padding": mean("padding"),
        "tokens": float(tokens),
        "sequences": float(sequences),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "seconds": seconds,
    }


def _step_line(step: int, steps: int, done: StepStats, reward: float) -> str:
    return (
        f"step {step}/{steps} | loss {done.loss:.4f} | reward {reward:.2f} | norm {done.grad_norm:.2f} "
        f"| lr {done.lr:.1e} | {done.seconds:.2f} s | {done.tokens / done.seconds:,.0f} tok/s"
    )
