"""The policy loss: advantage x clipped token ratio x token mean x correction for the engine."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.settings import TrainerSettings


class LossStats(NamedTuple):
    """Sums divided by the normaliser: added up over microbatches and ranks, token means."""

    kl_engine: Tensor
    """KL(engine || trainer before the update), the k3 estimate (joschu.net/blog/kl-approx)."""
    clip_fraction: Tensor
    """Fraction of tokens whose gradient the clip has cut off."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normaliser: float,
    settings: TrainerSettings,
) -> tuple[Tensor, LossStats]:
    """PPO-clip with the asymmetric bounds of DAPO (arXiv 2503.14476), as a token mean.

    All tensors are (tokens,): `logprobs` of the policy being trained, `old_logprobs` of the same policy
    before the batch's first update, `engine_logprobs` of the engine that sampled, natural logarithms at the
    sampling temperature; `advantages` of each token's sequence; `mask` 1 where the token is trained.
    `normaliser` is the number of trained tokens of the whole optimizer step, over all microbatches and
    ranks.

    Each term is weighted with sg(min(pi_old / mu_engine, engine_correction_cap)): truncated importance
    sampling, since the engine's numerics are not the trainer's. Returns the loss, a scalar to minimise, and
    its statistics.
    """
    mask = mask.to(logprobs.dtype)
    old_logprobs = old_logprobs.detach()
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    log_mismatch = old_logprobs - engine_logprobs
    correction = torch.exp(log_mismatch).clamp(max=settings.engine_correction_cap)
    loss = -(correction * surrogate * mask).sum() / normaliser
    with torch.no_grad():
        k3 = torch.expm1(log_mismatch) - log_mismatch
        cut_off = clipped * advantages < ratio * advantages
        stats = LossStats(
            kl_engine=(k3 * mask).sum() / normaliser,
            clip_fraction=(cut_off * mask).sum() / normaliser,
        )
    return loss, stats
