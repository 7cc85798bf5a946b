"""Preferences: how far each pair, or sample, of an optimizer step is from what its order, or label, asks for
(DPO, KTO).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch
from trainer.model.parallel import Layout
from trainer.settings import TrainerSettings
from trainer.update.kl_reward import Values, sums_of_sequences


class Preferences(NamedTuple):
    """Statistics of the pairs, or the labelled samples, of an optimizer step."""

    loss: float
    """Mean of -log sigmoid(margin), or of 1 - sigmoid(margin)."""
    margin: float
    """Mean of beta (D_better - D_worse), where D is the log ratio of a sample, policy to reference; or of
    +-beta (D - z)."""
    preferred: float
    """Fraction whose margin is above 0."""


def with_pair_weights(
    batch: Batch,
    plan: Sequence[Microbatch],
    log_ratios: Sequence[Values],
    step: range,
    beta: float,
    layout: Layout,
) -> tuple[list[Microbatch], Preferences]:
    """Return this rank's microbatches of a step, weighted for the gradient of DPO's loss (arXiv 2305.18290,
    section 4), and what the step's pairs show.

    `log_ratios`: log pi - log pi_reference of each trained token (N,) of each microbatch, by the policy
    before this step. The gradient of -log sigmoid(margin) is that of -A log pi, summed over the tokens of
    both samples, with A = +-beta sigmoid(-margin). A is doubled because the loss is a mean over sequences.
    So a pair need not be in one microbatch, nor on one rank. All ranks call this together.
    """
    sums = sums_of_sequences(batch, [plan], [log_ratios], layout)
    margins = beta * np.bincount(batch.groups, weights=batch.advantages * sums)
    losses = np.logaddexp(0, -margins)
    weights = 2 * beta * -np.expm1(-losses)  # 1 - sigmoid(margin), exact for a large one too
    scaled = [
        replace(
            m, advantages=(m.advantages * weights[batch.groups[m.members]][m.sequences]).astype(np.float32)
        )
        for m in plan
    ]
    pairs = np.unique(batch.groups[step.start : step.stop])
    of_pairs = losses[pairs].mean(), margins[pairs].mean(), (margins[pairs] > 0).mean()
    return scaled, Preferences(*map(float, of_pairs))


def with_shifted_answers(batch: Batch, steps: Sequence[range]) -> Batch:
    """Return the batch with the answers moved on by one sequence within each step, each behind the prompt of
    the next: what KTO measures the policy's distance from the reference by. None gets longer than the
    batch's longest sequence, and an answer ends before a picture that it was shown. Experts are chosen anew,
    as the routes of an answer are those behind its own prompt.
    """
    answers = np.arange(len(batch))
    for step in steps:
        answers[step.start : step.stop] = np.roll(step, 1)
    prompts, longest = batch.prompt_tokens, batch.lengths().max()
    begins, ends = batch.offsets[:-1] + prompts, batch.offsets[1:].copy()
    for k, pictures in enumerate(batch.pictures):
        shown = [picture.begin for picture in pictures if picture.begin >= prompts[k]]
        ends[k] = batch.offsets[k] + min(shown) if shown else ends[k]
    pieces = [
        [
            np.arange(begins[k] - prompts[k], begins[k]),
            np.arange(begins[other], ends[other])[: longest - prompts[k]],
        ]
        for k, other in enumerate(answers)
    ]
    tokens = np.concatenate([piece for of_sequence in pieces for piece in of_sequence])
    return replace(
        batch,
        **{name: getattr(batch, name)[tokens] for name in ("token_ids", "loss_mask", "logprobs", "ages")},
        **{name: getattr(batch, name)[:0] for name in ("teacher_logprobs", "token_advantages", "routes")},
        offsets=np.cumsum([0, *(sum(map(len, of_sequence)) for of_sequence in pieces)], dtype=np.int64),
        pictures=[
            [picture for picture in pictures if picture.begin < prompts[k]]
            for k, pictures in enumerate(batch.pictures)
        ],
    )


def with_label_weights(
    batch: Batch,
    plan: Sequence[Microbatch],
    log_ratios: Sequence[Values],
    mismatched_plan: Sequence[Microbatch],
    mismatched_ratios: Sequence[Values],
    step: range,
    settings: TrainerSettings,
    layout: Layout,
) -> tuple[list[Microbatch], Preferences]:
    """Return this rank's microbatches of a step, weighted for the gradient of KTO's loss (arXiv 2402.01306,
    equation 8), and what the step's samples show; see with_pair_weights.

    `mismatched_ratios` are those of `mismatched_plan`, of the batch that with_shifted_answers makes: their
    mean, at least 0, is z. No gradient flows through it. The gradient of 1 - sigmoid(m), m = +-beta (D - z),
    is that of -A log pi, summed over tokens, with A = +-beta sigmoid(m) sigmoid(-m).
    """
    span = slice(step.start, step.stop)
    sums = sums_of_sequences(batch, [plan], [log_ratios], layout)
    distance = sums_of_sequences(batch, [mismatched_plan], [mismatched_ratios], layout)[span].mean()
    margins = settings.pair_beta * batch.advantages * (sums - max(0.0, distance))
    losses = np.exp(-np.logaddexp(0, margins))  # 1 - sigmoid(margin), exact for a large one too
    of_labels = np.where(batch.advantages > 0, 1.0, settings.undesirable_weight)
    weights = settings.pair_beta * of_labels * losses * (1 - losses)
    scaled = [
        replace(m, advantages=(m.advantages * weights[m.members][m.sequences]).astype(np.float32))
        for m in plan
    ]
    of_samples = (
        (of_labels * losses)[span].mean(),
        margins[span].mean(),
        (margins[span] > 0).mean(),
    )
    return scaled, Preferences(*map(float, of_samples))
