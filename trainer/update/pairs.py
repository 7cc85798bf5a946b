"""Preferences: how far each pair of an optimizer step is from what its samples' order asks for (DPO)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch
from trainer.model.parallel import Layout
from trainer.update.kl_reward import Values, sums_of_sequences


class Preferences(NamedTuple):
    """Of the pairs of an optimizer step."""

    loss: float
    """Mean of -log sigmoid(margin)."""
    margin: float
    """Mean of beta (D_better - D_worse), where D is the log ratio of a sample, policy to reference."""
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
    here = np.unique(batch.groups[step.start : step.stop])
    of_pairs = losses[here].mean(), margins[here].mean(), (margins[here] > 0).mean()
    return scaled, Preferences(*map(float, of_pairs))
