"""KL in the reward: advantages that are lower where the policy has left the reference (trainer.kl_in)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.batch.advantages import LEAST_VARIANCE
from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch
from trainer.model.parallel import Layout
from trainer.peers import waiting_for_peers
from trainer.settings import TrainerSettings

Values = NDArray[np.float64]


def with_kl_in_reward(
    batch: Batch,
    plans: Sequence[Sequence[Microbatch]],
    kl: Sequence[Sequence[Values]],
    settings: TrainerSettings,
    layout: Layout,
) -> list[list[Microbatch]]:
    """Return the microbatches of this rank, of all steps, with advantages of rewards that `kl` was taken
    from.

    `kl`: an estimate for each trained token (N,) of each microbatch, by the policy before the first update.
    token_reward: a token's advantage falls by the sum over itself and the later tokens of its sequence, since
    it has an influence on no other (PPO, arXiv 2203.02155; REINFORCE++). reward: a sample's reward falls by
    the sum over all of its tokens, before the mean of its group is taken (RLOO, arXiv 2402.14740). Whitening
    comes last. All ranks call this together.
    """
    if settings.kl_in == "token_reward":
        penalties = [[_to_go(values, m) for m, values in pairs] for pairs in _pairs(plans, kl)]
    else:
        of_sequences = _of_sequences(batch, plans, kl, settings, layout)
        penalties = [[of_sequences[m.members][m.sequences] for m in plan] for plan in plans]
    advantages = [
        [m.advantages - settings.kl_coefficient * values for m, values in pairs]
        for pairs in _pairs(plans, penalties)
    ]
    if settings.advantage == "whitened":
        advantages = _whitened(advantages, layout)
    return [
        [replace(m, advantages=values.astype(np.float32)) for m, values in pairs]
        for pairs in _pairs(plans, advantages)
    ]


def _pairs(
    plans: Sequence[Sequence[Microbatch]], values: Sequence[Sequence[Values]]
) -> list[list[tuple[Microbatch, Values]]]:
    return [list(zip(plan, kl, strict=True)) for plan, kl in zip(plans, values, strict=True)]


def _to_go(kl: Values, microbatch: Microbatch) -> Values:
    """(N,) the sum of `kl` (N,) over each token and the later ones of its sequence."""
    # The tokens of a sequence lie side by side, in their order.
    ends = np.cumsum(np.bincount(microbatch.sequences, minlength=len(microbatch.members)))
    up_to = np.concatenate([[0.0], np.cumsum(kl)])
    return up_to[ends][microbatch.sequences] - up_to[:-1]


def _of_sequences(
    batch: Batch,
    plans: Sequence[Sequence[Microbatch]],
    kl: Sequence[Sequence[Values]],
    settings: TrainerSettings,
    layout: Layout,
) -> Values:
    """(S,) the sum over each sequence's tokens, as the advantage takes it from the reward: less the mean over
    its group, or over the others of it.
    """
    sums = sums_of_sequences(batch, plans, kl, layout)
    sizes = np.bincount(batch.groups)
    centred = sums - (np.bincount(batch.groups, weights=sums) / np.maximum(1, sizes))[batch.groups]
    if settings.advantage == "leave_one_out":
        return centred * (sizes / np.maximum(1, sizes - 1))[batch.groups]
    return centred


def sums_of_sequences(
    batch: Batch, plans: Sequence[Sequence[Microbatch]], values: Sequence[Sequence[Values]], layout: Layout
) -> Values:
    """(S,) the sum of `values` (N,) of each microbatch over the trained tokens of each sequence; 0 for a
    sequence that is in none of all ranks' microbatches. All ranks call this together.
    """
    sums = np.zeros(len(batch))
    for pairs in _pairs(plans, values):
        for microbatch, weights in pairs:
            sums[microbatch.members] = np.bincount(
                microbatch.sequences, weights=weights, minlength=len(microbatch.members)
            )
    return _over_ranks(sums, layout)


def _whitened(advantages: Sequence[Sequence[Values]], layout: Layout) -> list[list[Values]]:
    """Return the advantages with mean 0 and deviation 1 over all ranks' tokens; see `advantages.whiten`."""
    flat = np.concatenate([np.zeros(0), *(values for of_step in advantages for values in of_step)])
    total, tokens = _over_ranks(np.array([flat.sum(), len(flat)]), layout)
    mean = total / tokens
    (squares,) = _over_ranks(np.array([((flat - mean) ** 2).sum()]), layout)
    deviation = np.sqrt(max(squares / tokens, LEAST_VARIANCE))
    return [[(values - mean) / deviation for values in of_step] for of_step in advantages]


def _over_ranks(values: Values, layout: Layout) -> Values:
    """Return the sum over the ranks; those of a group have the same tokens, which count once."""
    if layout.world_size == 1:
        return values
    summed = torch.from_numpy(values)
    with waiting_for_peers("adding up the KL of the rewards"):
        dist.all_reduce(summed)
    return summed.numpy() / layout.group_size
