"""Compose the policy loss: advantage x ratio x clip x aggregation x correction for the engine, KL, entropy.

Each piece is one function, chosen by the setting of its name. The files of a new loss, where its values need
them:

- this file: one more branch of ratio, clip, aggregation, engine_correction or kl
- trainer/batch/advantages.py: `advantage`; one that weighs the samples of a step, as pair and label do, also
  in preferences.py and step.py, and in batch/selection.py what is drawn together
- kl_reward.py and step.py: `kl_in`, the KL of rewards
- trainer/choices.py: the value; trainer/loss_settings.py: what is refused with it; then
  docs/settings.md, by `python -m scripts.settings_page`
- trainer/algorithms.py: the preset, and its paragraph in docs/algorithms.md
- tests/trainer/update/test_loss.py, and tests/against_trl/test_losses.py if TRL has it
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.settings import TrainerSettings
from trainer.source_settings import OF_LOSS

SOFT_TEMPERATURES = (1.0, 1.05)
"""Temperatures of clip=soft, for advantages above 0 and for the others: what pushes tokens down is damped
sooner (SAPO, arXiv 2511.20347)."""
_STATISTIC_MAX = 20.0
"""Limit of a log ratio in a statistic: one absurd token must not make the statistic infinite."""


class Totals(NamedTuple):
    """The counts that normalise an optimizer step, over all its microbatches and ranks."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """All that count, also those without a gradient, which are in no microbatch."""
    max_tokens: int
    """The longest completion that could be sampled (rollout.max_tokens)."""
    absent_tokens: int = 0
    """Tokens that count beside `tokens`: of sequences without a gradient."""


class TrainedTokens(NamedTuple):
    """The trained tokens of a microbatch: all (N,), N = 0 included. Logprobs are natural logarithms at the
    sampling temperature.
    """

    logprobs: Tensor
    """What the policy being trained gives them, with its gradient."""
    old_logprobs: Tensor
    """What the same policy gave them before the batch's first update, for which `logprobs` will do:
    no gradient flows through these."""
    engine_logprobs: Tensor
    """What the engine that sampled gave them; NaN where none has (a demonstration): nothing is corrected."""
    reference_logprobs: Tensor | None
    """What the reference model gives them."""
    advantages: Tensor
    sequences: Tensor
    """int64: numbers the microbatch's sequences from 0, all trained tokens of each being in it."""
    entropies: Tensor | None = None
    """The entropy of the policy being trained at each token, with its gradient; an entropy bonus needs it."""

    def at(self, places: Tensor) -> "TrainedTokens":
        """Return the tokens at some places, (M,) int64, which hold all or none of a sequence."""
        chosen = [None if values is None else values[places] for values in self]
        return TrainedTokens(*chosen)._replace(  # pyright: ignore[reportArgumentType]
            sequences=self.sequences[places].unique(return_inverse=True)[1]
        )


def policy_loss(tokens: TrainedTokens, totals: Totals, settings: TrainerSettings) -> tuple[Tensor, Tensor]:
    """Return the loss of one microbatch, a scalar to minimise, and (1 + len(STATS), N), detached: each
    token's term of it, without divisor and entropy bonus, and what trainer.statistics.STATS are means of.

    The loss is a sum divided by the normaliser of the whole optimizer step: added up over microbatches and
    ranks it is the step's. Without tokens it is 0, and its gradient empty. Raises ValueError if
    `settings.kl` needs a reference that is not given, or the entropies are missing.
    """
    tokens = tokens._replace(old_logprobs=tokens.old_logprobs.detach())
    objective, cut_off = _objective(_ratio(tokens, settings), tokens, settings)
    mismatch = tokens.old_logprobs - tokens.engine_logprobs
    log_mismatch = torch.where(tokens.engine_logprobs.isnan(), 0.0, mismatch)
    weight = _correction(log_mismatch, tokens.sequences, settings)
    terms = -weight * objective
    to_reference = None if tokens.reference_logprobs is None else tokens.logprobs - tokens.reference_logprobs
    if settings.kl != "off":
        if to_reference is None:
            raise ValueError(f"trainer.kl={settings.kl} needs the logprobs of a reference model")
        if settings.kl_in == "loss":
            terms = terms + settings.kl_coefficient * _kl(to_reference, settings.kl)
    loss = (terms / _divisor(tokens.sequences, totals, settings)).sum()
    if settings.entropy_bonus:
        if tokens.entropies is None:
            raise ValueError(f"trainer.entropy_bonus={settings.entropy_bonus:g} needs the policy's entropies")
        # A mean over tokens whatever the aggregation, as in TRL: its weight means the same with all of them.
        loss = loss - settings.entropy_bonus * tokens.entropies.sum() / totals.tokens
    with torch.no_grad():
        stats = [_k3(-log_mismatch), cut_off.to(terms.dtype), torch.zeros_like(terms)]
        if to_reference is not None:
            stats[2] = _k3(to_reference)
        is_corrected = settings.engine_correction != "off"
        stats.append((weight != (torch.exp(log_mismatch) if is_corrected else 1)).to(terms.dtype))
        uncut = torch.exp(log_mismatch.clamp(max=_STATISTIC_MAX))
        stats += [uncut, uncut.square()]
        return loss, torch.stack([terms.detach(), *stats])


def loss_of_sources(
    kinds: NDArray[np.int64],
    settings_of_kinds: Sequence[TrainerSettings],
    tokens: TrainedTokens,
    totals: Totals,
) -> tuple[Tensor, Tensor]:
    """Return the same as policy_loss where sources of tasks have losses of their own: `kinds` (N,), the same
    for all tokens of a sequence, numbers the settings of each token. What a loss divides by counts all
    tokens and sequences of the step, so each source weighs as much as it would in a single loss.
    """
    if len(settings_of_kinds) == 1:
        return policy_loss(tokens, totals, settings_of_kinds[0])
    losses, places, terms = list[Tensor](), list[Tensor](), list[Tensor]()
    for kind, settings in enumerate(settings_of_kinds):
        at = torch.from_numpy(np.flatnonzero(kinds == kind)).to(tokens.logprobs.device)
        loss, of_tokens = policy_loss(tokens.at(at), totals, settings)
        losses.append(loss)
        places.append(at)
        terms.append(of_tokens)
    return torch.stack(losses).sum(), torch.cat(terms, 1)[:, torch.cat(places).argsort()]


def kinds_of_loss(
    source_names: Sequence[str], settings: TrainerSettings
) -> tuple[NDArray[np.int64], list[TrainerSettings]]:
    """Return the different losses of a batch's sources: (sources,) the number of each one's, and the settings
    by number. A batch without sources is a single one.
    """
    kinds: dict[tuple[object, ...], int] = {}
    settings_of_kinds: list[TrainerSettings] = []
    numbers: list[int] = []
    for name in source_names or [""]:
        of_source = settings.of_source(name)
        key = tuple(getattr(of_source, setting) for setting in OF_LOSS)
        if key not in kinds:
            kinds[key] = len(kinds)
            settings_of_kinds.append(of_source)
        numbers.append(kinds[key])
    return np.array(numbers, np.int64), settings_of_kinds


def adapted_bonus(bonus: float, entropy: float, target: float, by: float) -> float:
    """Return the weight of the entropy bonus after a step of this entropy (Skywork-OR1, arXiv 2505.22312):
    higher if the policy is at the target or below, else lower; from 0 to 1.
    """
    return min(max(bonus + (by if entropy <= target else -by), 0.0), 1.0)


def _ratio(tokens: TrainedTokens, settings: TrainerSettings) -> Tensor:
    """(N,) pi_theta / pi_old of each token, or of its sequence.

    The sequence's is the geometric mean of its tokens' (GSPO, arXiv 2507.18071), in the form of GSPO-token:
    the value is the sequence's, the gradient goes through the token alone. Where the tokens of a sequence
    have one advantage, the gradient of their mean is the same.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    if settings.ratio == "sequence":
        mean = _means(log_ratio.detach(), tokens.sequences)[tokens.sequences]
        log_ratio = mean + tokens.logprobs - tokens.logprobs.detach()
    return torch.exp(log_ratio)


def _objective(ratio: Tensor, tokens: TrainedTokens, settings: TrainerSettings) -> tuple[Tensor, Tensor]:
    """(N,) what is to be maximised, and (N,) bool, where the clip has cut off or weakened its gradient.

    none: rho A. ppo: min(rho A, clip(rho) A). dual: as ppo, but at least c A where A < 0 (arXiv 1912.09729).
    cispo: sg(clip(rho)) A log pi, which keeps a gradient at every token (arXiv 2506.13585). soft:
    A (4 / t) sigmoid(t (rho - 1)), a gate whose slope is 1 at rho = 1 and less on both sides (SAPO, arXiv
    2511.20347); weakened is what has less than half. geometric: A times the geometric mean of the sequence's
    ratios, with log rho clipped to [-clip_low, clip_high] where the advantage leads further out (GMPO, arXiv
    2507.20673). divergence: rho A, but 0 where the advantage leads away from the engine's mu and pi - mu, the
    probability that has moved, is outside of [-clip_low, clip_high] (binary total variation: DPPO, arXiv
    2602.04879). likelihood: A log pi; with A = 1 the loss is the negative log-likelihood, whatever the ratio.
    """
    logprobs, advantages = tokens.logprobs, tokens.advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    match settings.clip:
        case "likelihood":
            return advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)
        case "none":
            return ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
        case "cispo":
            return clipped.detach() * advantages * logprobs, clipped != ratio
        case "ppo":
            return torch.minimum(ratio * advantages, clipped * advantages), (
                clipped * advantages < ratio * advantages
            )
        case "soft":
            temperature = torch.where(advantages > 0, *ratio.new_tensor(SOFT_TEMPERATURES))
            gate = torch.sigmoid(temperature * (ratio - 1))
            return 4 / temperature * gate * advantages, 4 * gate * (1 - gate) < 0.5
        case "geometric":
            log_ratio = torch.log(ratio)
            bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
            limited = torch.where(
                advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
            )
            mean = _means(limited.detach(), tokens.sequences)[tokens.sequences]
            return torch.exp(mean + limited - limited.detach()) * advantages, limited != log_ratio
        case "divergence":
            change = logprobs.detach().exp() - tokens.engine_logprobs.exp()
            is_far = torch.where(advantages > 0, change > settings.clip_high, change < -settings.clip_low)
            is_far &= advantages != 0
            return torch.where(is_far, 0.0, ratio * advantages), is_far
        case "dual":
            bounded = torch.minimum(ratio * advantages, clipped * advantages)
            floor = torch.where(advantages < 0, settings.dual_clip * advantages, -torch.inf)
            return torch.maximum(bounded, floor), (clipped * advantages < ratio * advantages) | (
                bounded < floor
            )


def _correction(log_mismatch: Tensor, sequences: Tensor, settings: TrainerSettings) -> Tensor:
    """(N,) weight of each token, since the engine mu has sampled it and not pi_old; no gradient.

    With w = pi_old / mu: truncated importance sampling min(w, cap), or masked, w and 0 outside of
    [1 / cap, cap]. With engine_sequence_cap it is 0 in every token of a sequence whose geometric mean of w
    lies outside of those bounds (geometric masking, as verl's rollout correction has it).
    """
    cap = settings.engine_correction_cap
    weight = torch.exp(log_mismatch)
    match settings.engine_correction:
        case "off":
            weight = torch.ones_like(weight)
        case "truncated":
            weight = weight.clamp(max=cap)
        case "masked":
            weight = torch.where((weight <= cap) & (weight >= 1 / cap), weight, 0.0)
    if settings.engine_sequence_cap is not None:
        far = _means(log_mismatch, sequences).abs() > math.log(settings.engine_sequence_cap)
        weight = torch.where(far[sequences], 0.0, weight)
    return weight


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """(N,) the value of an estimate of KL(policy || reference), from log pi - log pi_reference of tokens that
    the policy has sampled (joschu.net/blog/kl-approx); `estimator` is a value of trainer.kl.
    """
    return log_ratio if estimator == "k1" else _kl(log_ratio, estimator)


def _kl(log_ratio: Tensor, estimator: str) -> Tensor:
    """(N,) the same as a loss to be differentiated.

    k2 and k3 are differentiated as they are. k1 is not: the expectation of its gradient is 0, whatever the
    reference. Its value is k1, but its gradient is k2's, that of k1 taken from the reward of this one token
    (arXiv 2510.01555; verl calls it `k1+`). In the reward proper it is also charged to the tokens before,
    which have led here: trainer.kl_in.
    """
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    k2 = log_ratio.square() / 2
    return k2 if estimator == "k2" else k2 + (log_ratio - k2).detach()


def _k3(log_ratio: Tensor) -> Tensor:
    """(N,) k3 for a statistic, of log p - log q where p has sampled: an estimate of KL(p || q)."""
    return _kl(log_ratio.clamp(min=-_STATISTIC_MAX), "k3")


def _divisor(sequences: Tensor, totals: Totals, settings: TrainerSettings) -> Tensor | int:
    """Return the divisor of each token's term, (N,) or a number, so that the sum over a step is its loss."""
    match settings.aggregation:
        case "token":
            return totals.tokens + totals.absent_tokens
        case "sequence":
            return _lengths(sequences)[sequences] * totals.sequences
        case "sum":
            return totals.sequences
        case "constant":
            return totals.sequences * totals.max_tokens


def _means(values: Tensor, sequences: Tensor) -> Tensor:
    """(K,) the mean of `values` (N,) over the tokens of each sequence."""
    lengths = _lengths(sequences)
    return values.new_zeros(len(lengths)).index_add(0, sequences, values) / lengths


def _lengths(sequences: Tensor) -> Tensor:
    """(K,) int64, trained tokens of each sequence."""
    return torch.bincount(sequences)
