"""Weighted split of an iteration's slots over the ranks. Pure."""

from collections.abc import Mapping, Sequence
from fractions import Fraction


def share_sizes(total: int, weights: Mapping[int, float]) -> dict[int, int]:
    """Return how many of `total` slots each rank gets: largest remainder, so the sizes add up to `total`.

    `weights` maps a rank to a positive number; equal remainders go to the heavier rank, then to the lower
    one. Exact fractions, since 0.1 + 0.2 must not decide who gets a slot.
    """
    exact = {rank: Fraction(weight) for rank, weight in weights.items()}
    if not exact or min(exact.values()) <= 0:
        raise ValueError(f"weights must be positive, one for each rank: {dict(weights)}")
    exact_total = sum(exact.values())
    quota = {rank: total * weight / exact_total for rank, weight in exact.items()}
    sizes = {rank: int(share) for rank, share in quota.items()}
    by_remainder = sorted(quota, key=lambda rank: (sizes[rank] - quota[rank], -exact[rank], rank))
    for rank in by_remainder[: total - sum(sizes.values())]:
        sizes[rank] += 1
    return sizes


def split_slots(
    slots: Sequence[int], weights: Mapping[int, float], have: Mapping[int, int] = {}
) -> dict[int, list[int]]:
    """Give every slot to exactly one rank, in runs of consecutive slots, sized by weight. `have`: how many
    other slots a rank has already, by which its part is smaller.
    """
    sizes = share_sizes(len(slots) + sum(have.values()), weights)
    more = {rank: float(size - have.get(rank, 0)) for rank, size in sizes.items()}
    more = {rank: size for rank, size in more.items() if size > 0}
    sizes = dict.fromkeys(weights, 0) | (share_sizes(len(slots), more) if more else {})
    shares: dict[int, list[int]] = {}
    start = 0
    for rank, size in sorted(sizes.items()):
        shares[rank] = list(slots[start : start + size])
        start += size
    return shares
