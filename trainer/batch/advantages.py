"""Compute advantages from the rewards of a group. Torch-free."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.loss_settings import ALONE

Values = NDArray[np.float64]

_EPSILON = 1e-6
"""Added to a standard deviation: rewards that differ only by rounding teach nothing."""
LEAST_VARIANCE = 1e-8
"""What whitening divides by the root of, at least."""


def _centred(rewards: Values) -> Values:
    """r - mean (Dr. GRPO, arXiv 2503.20783)."""
    return rewards - rewards.mean()


def _standardised(rewards: Values) -> Values:
    """(r - mean) / std (GRPO, arXiv 2402.03300), with the sample's deviation (n - 1), as TRL and verl do."""
    spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return (rewards - rewards.mean()) / (spread + _EPSILON)


def _leave_one_out(rewards: Values) -> Values:
    """r - mean of the others (RLOO, arXiv 2402.14740), which is (r - mean) n / (n - 1)."""
    return (rewards - rewards.mean()) * len(rewards) / max(1, len(rewards) - 1)


def _success(rewards: Values) -> Values:
    """(r - mean) / mean (MaxRL, arXiv 2602.02710): with rewards of 0 and 1 the step climbs log p, where p is
    the chance of a success, so a task that hardly ever succeeds weighs more.
    """
    if (rewards < 0).any():
        raise ValueError(
            f"trainer.advantage=success divides by a group's mean reward, so it needs rewards from 0 up, got "
            f"{rewards.tolist()}; shift the reward, or take another advantage"
        )
    return (rewards - rewards.mean()) / rewards.mean()


def decoupled(values: Sequence[Sequence[float]], weights: Sequence[float]) -> Values:
    """(n,) the weighted sum of several rewards of a group's samples, `values` (n, K), each standardised
    within the group before its weight (K,) counts: one that varies much does not drown the others (GDPO,
    arXiv 2601.05242).
    """
    columns = np.array(values, dtype=np.float64).T
    return np.sum(
        [weight * _standardised(column) for column, weight in zip(columns, weights, strict=True)], axis=0
    )


def _pair(rewards: Values) -> Values:
    """1 for the first of the best, -1 for the first of the worst, 0 for all others."""
    signs = np.zeros_like(rewards)
    signs[rewards.argmax()], signs[rewards.argmin()] = 1, -1
    return signs


def _label(rewards: Values) -> Values:
    """1 for a reward above 0, else -1."""
    return np.where(rewards > 0, 1.0, -1.0)


_KINDS: dict[str, Callable[[Values], Values]] = {
    "centred": _centred,
    "standardised": _standardised,
    "leave_one_out": _leave_one_out,
    "success": _success,
    "whitened": _centred,  # `whiten` does the second half, which needs the whole batch
    "decoupled": _centred,  # of the sums that `decoupled` has made; so does `standardised_batch` here
    "one": np.ones_like,
    "zero": np.zeros_like,
    "pair": _pair,
    "label": _label,
}


def group_advantages(rewards: ArrayLike, kind: str = "centred", *, keep_flat: bool = False) -> Values | None:
    """(n,) advantages of one group's samples; `kind` is a value of the setting `trainer.advantage`.

    `rewards` (n,) holds the samples that exist: the caller leaves out a cancelled or failed one, which is not
    a zero. The result is None if the group teaches nothing, with fewer than two samples or no variance;
    zeros with `keep_flat`. From the kinds of ALONE each group learns. Raises ValueError for a reward that is
    not finite, or that `kind` has no advantage for.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards of a group are one-dimensional, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"a reward is not a finite number: {values.tolist()}; check the reward function")
    if kind not in ALONE and (len(values) < 2 or np.ptp(values) == 0):
        return np.zeros_like(values) if keep_flat else None
    return _KINDS[kind](values)


def turn_advantages(
    rewards: Sequence[Sequence[float]], kind: str = "centred", *, discount: float = 1.0
) -> list[Values]:
    """[(K_s,), ...] advantages of the turns of a group's samples, from what each turn has earned.

    Turn k of sample s has the return G_sk = sum over l >= k of discount^(l - k) r_sl. Its advantage is that
    of G_sk, by `kind`, among the returns of all samples that have a turn k: the step advantage of GiGPO
    (arXiv 2505.10978), where same turn, not same state, is what is compared, as in MT-GRPO (arXiv
    2505.11821). A mean for each step does not bias the gradient (Peters and Schaal 2008). A turn that a
    single sample has reached has that sample's advantage, which is that of its first turn.
    With a reward at the end alone, as many turns in each and discount 1, all turns have the sample's.
    """
    returns = [_returns(of_turns, discount) for of_turns in rewards]
    advantages = [np.zeros_like(values) for values in returns]
    for k in range(max(map(len, returns), default=0)):
        long_enough = [s for s, values in enumerate(returns) if len(values) > k]
        if k and len(long_enough) == 1:
            advantages[long_enough[0]][k] = advantages[long_enough[0]][0]
            continue
        compared = group_advantages([returns[s][k] for s in long_enough], kind, keep_flat=True)
        for s, advantage in zip(long_enough, () if compared is None else compared, strict=True):
            advantages[s][k] = advantage
    return advantages


def state_advantages(
    of_samples: ArrayLike,
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[str | None]],
    kind: str = "centred",
    *,
    discount: float = 1.0,
    weight: float = 1.0,
) -> list[Values]:
    """[(K_s,), ...] advantages of the turns of a group's samples (GiGPO, arXiv 2505.10978): that of the
    sample, `of_samples` (n,), plus `weight` times that of the turn's return, by `kind`, among those of all
    turns of the group in the same state, several of one sample too. A state that came once, or None, adds
    nothing.
    """
    returns = [_returns(of_turns, discount) for of_turns in rewards]
    places: dict[str, list[tuple[int, int]]] = {}
    for s, names in enumerate(states):
        for k, name in enumerate(names):
            if name is not None:
                places.setdefault(name, []).append((s, k))
    per_sample = np.asarray(of_samples, dtype=np.float64)
    advantages = [
        np.full_like(turns, of_sample) for turns, of_sample in zip(returns, per_sample, strict=True)
    ]
    for places_of_state in places.values():
        compared = group_advantages([returns[s][k] for s, k in places_of_state], kind, keep_flat=True)
        for (s, k), advantage in zip(places_of_state, () if compared is None else compared, strict=True):
            advantages[s][k] += weight * advantage
    return advantages


def _returns(rewards: Sequence[float], discount: float) -> Values:
    """(K,) the discounted sum of rewards (K,) from each turn on."""
    values = np.array(rewards, dtype=np.float64)
    for k in reversed(range(len(values) - 1)):
        values[k] += discount * values[k + 1]
    return values


def whiten(advantages: ArrayLike, tokens: ArrayLike) -> Values:
    """(S,) advantages of all samples of a batch, with mean 0 and deviation 1 over their trained tokens
    (REINFORCE++, arXiv 2501.03262, equation 9, as OpenRLHF computes it: a token has the advantage of its
    sample, the divisor is the number of tokens, a variance below 1e-8 counts as 1e-8).

    `tokens` (S,): how many trained tokens each sample has. Where there are none, nothing is changed.
    """
    values, counts = np.asarray(advantages, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if not counts.sum():
        return values
    centred = values - np.average(values, weights=counts)
    return centred / np.sqrt(max(np.average(centred**2, weights=counts), LEAST_VARIANCE))


def standardised_batch(advantages: Sequence[float]) -> Values:
    """(S,) advantages of all samples of a batch over their deviation: the sums of several rewards have the
    same scale, however many there are (GDPO, arXiv 2601.05242).
    """
    return _standardised(np.array(advantages)) if advantages else np.zeros(0)
