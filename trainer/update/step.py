"""Train on a batch: optimizer steps, on all ranks together."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainer.batch.batch import Batch
from trainer.batch.building import check_engine_logprobs
from trainer.batch.packing import Microbatch, plan_step, split_steps
from trainer.batch.selection import PAIR
from trainer.model.learner import Learner
from trainer.peers import waiting_for_peers
from trainer.progress import Progress
from trainer.settings import TrainerSettings
from trainer.statistics import BY_SOURCE, STATS
from trainer.update.kl_reward import with_kl_in_reward
from trainer.update.loss import (
    Totals,
    TrainedTokens,
    adapted_bonus,
    kinds_of_loss,
    kl_estimate,
    loss_of_sources,
)
from trainer.update.preferences import with_label_weights, with_pair_weights, with_shifted_answers
from trainer.update.step_stats import StepStats, step_line


class TrainingDiverged(RuntimeError):
    """A loss or gradient is not a finite number; the weights have not taken the step."""


def train(
    learner: Learner,
    batch: Batch,
    settings: TrainerSettings,
    *,
    max_tokens: int,
    span: tuple[float, float] = (0.0, 0.0),
    rank_weights: Sequence[float] = (1.0,),
    report: Callable[[str], None] = print,
    progress: Progress | None = None,
    first_step: AbstractContextManager[object] | None = None,
) -> list[StepStats]:
    """Train on every sequence of `batch` settings.passes times; `report` gets a line for each optimizer step.

    `max_tokens` is the longest completion that could be sampled. `span`: the fractions of the run's
    iterations that are over before and after this batch, between which settings.schedule moves from step to
    step.
    `rank_weights`: one per global rank; a rank's share of the tokens follows its weight. `progress` advances
    with each microbatch that has passed through the model. The first optimizer step is taken in `first_step`.

    All ranks call this with the same arguments, and do the same number of steps; the result does not depend
    on the number of ranks or their weights. A step in which nothing has a gradient is not taken. With
    settings.needs_reference it must have been loaded (Learner.load_reference). Raises TrainingDiverged, and
    ValueError if the loss needs logprobs of an engine that the batch lacks.
    """
    check_engine_logprobs(batch, settings)
    steps = _steps(batch, settings, max_tokens)
    if not steps:
        report("no step: no group of this iteration has an advantage; the weights stay")
        return []
    layout = learner.layout
    weights = layout.data_weights(rank_weights)

    def planned(batch: Batch) -> list[list[Microbatch]]:
        most, packing = settings.max_tokens_per_microbatch, learner.arrangement.packing
        return [plan_step(batch, step.sequences, weights, layout.data_rank, most, packing) for step in steps]

    plans = planned(batch)
    other_plans: list[list[Microbatch]] = [[] for _ in steps]
    if settings.advantage == "label":
        other_plans = planned(with_shifted_answers(batch, [step.sequences for step in steps]))
    progress = progress or Progress()
    kl_in_reward = settings.kl != "off" and settings.kl_in != "loss"
    # Several updates: pi_old is the policy before the first one. For a first step that does not come again
    # that is the policy itself, which need not be asked before, unless the reward depends on it.
    scored = plans if kl_in_reward or settings.passes > 1 else plans[1:]
    trained = [*plans, *other_plans, *(plans if settings.weighs_samples else ())]
    progress.expect(sum(map(len, scored)) + settings.passes * sum(map(len, trained)))
    befores = [[_PriorLogprobs()] * len(plan) for plan in plans[: len(plans) - len(scored)]]
    for plan in scored:
        befores.append([])
        for microbatch in plan:
            befores[-1].append(_ask(learner, microbatch, settings.kl_to if kl_in_reward else None))
            progress.advance()
    if kl_in_reward:
        kl = [[_kl_of(before, settings.kl) for before in of_step] for of_step in befores]
        plans = with_kl_in_reward(batch, plans, kl, settings, layout)
    stats = []
    every = settings.passes * list(zip(steps, plans, other_plans, befores, strict=True))
    for k, (step, plan, other, before) in enumerate(every):
        fraction = span[0] + (span[1] - span[0]) * k / len(every)
        with first_step if first_step is not None and k == 0 else nullcontext():
            if settings.weighs_samples:
                done = _weighed_step(learner, batch, plan, other, before, step, settings, progress, fraction)
            else:
                done = _optimizer_step(learner, batch, plan, before, step, settings, progress, fraction)
        stats.append(done)
        report(step_line(k + 1, len(every), done, batch.counts.reward))
    return stats


class _PriorLogprobs(NamedTuple):
    """What was asked about a microbatch before the first update; (N,) each."""

    old: Tensor | None = None
    """Logprobs of the policy; None: the policy is still the same when they are needed."""
    reference: Tensor | None = None


@torch.no_grad()
def _ask(learner: Learner, microbatch: Microbatch, reference: str | None) -> _PriorLogprobs:
    old, _ = learner.logprobs(microbatch)
    return _PriorLogprobs(old, _reference(learner, microbatch, reference) if reference else None)


def _reference(learner: Learner, microbatch: Microbatch, kl_to: str) -> Tensor:
    """(N,) logprobs by the model that trainer.kl_to names. Collective if it is the base model."""
    if kl_to == "teacher":
        return torch.from_numpy(microbatch.teacher_logprobs).to(learner.device)
    return learner.reference_logprobs(microbatch)


def _kl_of(before: _PriorLogprobs, estimator: str) -> NDArray[np.float64]:
    assert before.old is not None and before.reference is not None
    return kl_estimate(before.old.double() - before.reference.double(), estimator).cpu().numpy()


class _Step(NamedTuple):
    """One optimizer step of a batch."""

    sequences: range
    """Places of its sequences in the batch."""
    tokens: int
    """Prompts included."""
    totals: Totals


def _steps(batch: Batch, settings: TrainerSettings, max_tokens: int) -> list[_Step]:
    """Cut the batch into optimizer steps, absent sequences included. A step without a gradient is left out.

    So a step is the same as if the absent sequences were there.
    """
    steps: list[_Step] = []
    unit = PAIR if settings.advantage == "pair" else 1
    units = (len(batch) + len(batch.absent_at)) // unit
    for of_units in split_steps(units, max(1, settings.global_batch_size // unit)):
        places = range(of_units.start * unit, of_units.stop * unit)
        first, last = np.searchsorted(batch.absent_at, [places.start, places.stop]).tolist()
        sequences = range(places.start - first, places.stop - last)
        if not (settings.teaches_flat_groups or batch.teaches(sequences)):
            continue
        begin, end = int(batch.offsets[sequences.start]), int(batch.offsets[sequences.stop])
        trained = int(batch.loss_mask[begin:end].sum())
        if trained:
            absent = int(batch.absent_tokens[first:last].sum())
            steps.append(_Step(sequences, end - begin, Totals(trained, len(places), max_tokens, absent)))
    return steps


def _weighed_step(
    learner: Learner,
    batch: Batch,
    plan: Sequence[Microbatch],
    other_plan: Sequence[Microbatch],
    befores: Sequence[_PriorLogprobs],
    step: _Step,
    settings: TrainerSettings,
    progress: Progress,
    fraction: float,
) -> StepStats:
    """Take an optimizer step on pairs, or on labelled samples; its loss is DPO's, or KTO's. They are weighed
    by the policy as it is now.
    """

    def log_ratios(plan: Sequence[Microbatch]) -> list[NDArray[np.float64]]:
        ratios: list[NDArray[np.float64]] = []
        for microbatch in plan:
            ratios.append(_kl_of(_ask(learner, microbatch, "base"), "k1"))
            progress.advance()
        return ratios

    sequences, layout, ratios = step.sequences, learner.layout, log_ratios(plan)
    if settings.advantage == "pair":
        plan, figures = with_pair_weights(batch, plan, ratios, sequences, settings.pair_beta, layout)
    else:
        plan, figures = with_label_weights(
            batch, plan, ratios, other_plan, log_ratios(other_plan), sequences, settings, layout
        )
    done = _optimizer_step(learner, batch, plan, befores, step, settings, progress, fraction)
    return replace(done, **figures._asdict())


def _optimizer_step(
    learner: Learner,
    batch: Batch,
    plan: Sequence[Microbatch],
    befores: Sequence[_PriorLogprobs],
    step: _Step,
    settings: TrainerSettings,
    progress: Progress,
    fraction: float,
) -> StepStats:
    """Accumulate the microbatches' gradients, sum them over the ranks, clip, and let the optimizer step.

    `fraction`: the fraction of the run that is over.
    """
    started = time.perf_counter()
    bonus, applied = settings.entropy_bonus, None
    if settings.entropy_target is not None:
        bonus, last_entropy = learner.entropy_control or (bonus, math.inf)
        applied = bonus if last_entropy <= settings.entropy_target else 0.0
        settings = settings.model_copy(update={"entropy_bonus": applied})
    learner.zero_sums()
    largest = torch.zeros((), device=learner.device)
    by_source = None
    if batch.source_names:
        by_source = torch.zeros(1 + len(BY_SOURCE), len(batch.source_names), device=learner.device)
    kind_of_source, settings_of_kinds = kinds_of_loss(batch.source_names, settings)
    for microbatch, before in zip(plan, befores, strict=True):
        sources = np.zeros(len(microbatch.targets), np.int64)
        if batch.source_names:
            sources = batch.sources[microbatch.members][microbatch.sequences]
        kinds = kind_of_source[sources]
        mismatch, measured = _accumulate(
            learner, microbatch, before, step.totals, settings.reference, kinds, settings_of_kinds
        )
        largest = torch.maximum(largest, mismatch)
        if by_source is not None:
            by_source.index_add_(1, torch.from_numpy(sources).to(learner.device), measured)
        progress.advance()
    (loss, *statistics, entropy), norm = learner.add_up()
    if learner.layout.world_size > 1:
        with waiting_for_peers("finding the largest mismatch with the engine"):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingDiverged(
            f"optimizer step {learner.optimizer_step + 1}: loss {loss}, gradient norm {norm}; "
            "lower trainer.learning_rate, or look for broken logprobs in the batch"
        )
    learner.scale_gradients(min(1.0, settings.clip_norm / (norm + 1e-6)))
    lr = learner.apply(settings, fraction)
    if settings.entropy_target is not None:
        adapted = adapted_bonus(bonus, entropy, settings.entropy_target, settings.entropy_step)
        learner.entropy_control = adapted, entropy
    return StepStats(
        loss=loss,
        **dict(zip(STATS, statistics, strict=True)),
        entropy=entropy,
        grad_norm=norm,
        mismatch_max=largest.item(),
        lr=lr,
        tokens=step.tokens,
        trained_tokens=step.totals.tokens,
        padding=_padding(plan),
        seconds=time.perf_counter() - started,
        entropy_bonus=applied,
        by_source=by_source,
    )


def _padding(plan: Sequence[Microbatch]) -> float:
    places = sum(microbatch.token_ids.size for microbatch in plan)
    return 1 - sum(microbatch.tokens for microbatch in plan) / places if places else 0.0


def _accumulate(
    learner: Learner,
    microbatch: Microbatch,
    before: _PriorLogprobs,
    totals: Totals,
    compared_with: str | None,
    kinds: NDArray[np.int64],
    settings_of_kinds: Sequence[TrainerSettings],
) -> tuple[Tensor, Tensor]:
    """Add a microbatch's gradients and statistics to its step's. Return the largest mismatch with the engine,
    (), and (1 + len(BY_SOURCE), N) what each token adds to StepStats.by_source. `compared_with`: see
    settings.reference; `kinds`, `settings_of_kinds`: see loss_of_sources.
    """
    nothing = torch.zeros((), device=learner.device)
    if not len(microbatch.targets) and not learner.layout.sharded:
        return nothing, torch.zeros(1 + len(BY_SOURCE), 0, device=learner.device)
    reference = before.reference
    if compared_with is not None and reference is None:
        reference = _reference(learner, microbatch, compared_with)
    logprobs, entropies = learner.logprobs(microbatch, settings_of_kinds[0].entropy_bonus > 0)
    old_logprobs = logprobs.detach() if before.old is None else before.old
    engine_logprobs = torch.from_numpy(microbatch.engine_logprobs).to(learner.device)
    tokens = TrainedTokens(
        logprobs,
        old_logprobs,
        engine_logprobs,
        reference,
        torch.from_numpy(microbatch.advantages).to(learner.device),
        torch.from_numpy(microbatch.sequences).to(learner.device),
        entropies,
    )
    loss, of_tokens = loss_of_sources(kinds, settings_of_kinds, tokens, totals)
    loss.backward()
    entropies = entropies.detach()
    statistics = torch.cat([of_tokens[1:], entropies[None]]).sum(1) / totals.tokens
    learner.sums.add_(torch.cat([loss.detach()[None], statistics]))
    mismatch = (old_logprobs - engine_logprobs).abs()[~engine_logprobs.isnan()]
    named = dict(zip(("loss", *STATS), of_tokens, strict=True)) | {"entropy": entropies}
    measured = torch.stack([torch.ones_like(entropies), *(named[name] for name in BY_SOURCE)])
    return mismatch.max() if len(mismatch) else nothing, measured
