"""Cut what is left of a rollout into chunks that ranks claim one after the other, and choose the next. Pure.

A group's *cost* is how many seconds it takes one of the places that a rank has for groups, on a rank whose
*pace* is 1: what costs 6 takes 2 s on a rank of pace 3. A rank's *width* is how many groups it has in flight
at most. What a group will cost is what groups of its task have cost before.

The list is ordered by cost, the dearest first, and the ranks by pace: so the fastest rank begins where the
groups take long, and the slowest where they do not. Each rank's place in the list is as long as its rate
(pace times width) has it; within a place the chunks become smaller. A rank takes its own place first, then
what is left of the others'.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import geometric_mean
from typing import Any, NamedTuple, Self

CHUNK_FRACTION = 3
"""A chunk is about a third of what is left of its place. So few claims are large, and the last are single
groups.
"""
UNKNOWN_FRACTION = 24
"""A chunk has at most this part of all slots if nobody knows their costs: some take ten times as long as the
usual one, and what a slow rank has claimed no other makes.
"""
FORGIVEN = 1.5
"""A rank that has made nothing in a phase is taken to be faster by this factor in the next."""


class Pace(NamedTuple):
    """What a rank has done in a phase: `work`, costs of its groups, and `busy_s`, their seconds in flight,
    both added up; `width`, how many groups it may have in flight at once.
    """

    work: float
    busy_s: float
    width: int

    @property
    def per_group(self) -> float:
        """Cost a second of one group."""
        return self.work / self.busy_s

    @property
    def rate(self) -> float:
        """Cost a second of as many groups as it may have in flight."""
        return self.per_group * self.width


@dataclass(frozen=True)
class Chunk:
    """Slots that are claimed together, in the order in which they are begun, and what each is to cost."""

    slots: list[int]
    costs: list[float]

    @cached_property
    def work(self) -> float:
        return sum(self.costs)

    @cached_property
    def dearest(self) -> float:
        return max(self.costs)


@dataclass(frozen=True)
class Chunks:
    """All chunks of a phase, the chunk at which each rank begins, and the paces that are known."""

    chunks: list[Chunk]
    first: dict[int, int]
    paces: dict[int, Pace]

    def as_json(self) -> dict[str, Any]:
        """Return the chunks as a document for `from_json`."""
        return {
            "chunks": [[chunk.slots, chunk.costs] for chunk in self.chunks],
            "first": {str(rank): number for rank, number in self.first.items()},
            "paces": {str(rank): list(pace) for rank, pace in self.paces.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the chunks of a document of `as_json`."""
        return cls(
            [Chunk(*chunk) for chunk in document["chunks"]],
            {int(rank): number for rank, number in document["first"].items()},
            paces_of(document["paces"]),
        )

    def costs(self) -> dict[int, float]:
        """Return the expected cost of each slot."""
        pairs = [zip(chunk.slots, chunk.costs, strict=True) for chunk in self.chunks]
        return dict(chain.from_iterable(pairs))

    def rates(self) -> dict[int, float]:
        """Return the rate of each rank, all equal while none is known."""
        return rates(self.first, self.paces)


def paces_of(document: Mapping[str, Any]) -> dict[int, Pace]:
    """Return paces by rank, as JSON has them, without those of ranks that have made nothing."""
    paces = {int(rank): Pace(*pace) for rank, pace in document.items()}
    return {rank: pace for rank, pace in paces.items() if pace.work > 0 and pace.busy_s > 0}


class RankTimings(NamedTuple):
    """What a rank has made in a phase: `seconds`, by slot, that each group was in flight, and its `width`."""

    seconds: dict[int, float]
    width: int


def made_of(document: Mapping[str, Any]) -> dict[int, RankTimings]:
    """Return the Made of each rank; JSON has it as `seconds` and `width` by rank."""
    return {
        int(rank): RankTimings({int(slot): s for slot, s in seconds.items()}, width)
        for rank, (seconds, width) in document.items()
    }


NOTHING_S = 1e-6
"""Nobody measures less; a quotient of smaller numbers may be 0."""


def measured(
    timings: Mapping[int, RankTimings], tokens: Mapping[int, int], expected: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, Pace]]:
    """Return the costs of a phase's groups, by slot, and the paces of the ranks that have made them.

    `tokens` by slot: of the longest sample of each group; `expected`: the costs that were expected of those
    whose task had been made before. Of the others is expected what their tokens say, and so it is taken for
    the cost of a group whose seconds nobody knows.
    """
    seconds = {slot: s for rank in timings.values() for slot, s in rank.seconds.items()}
    known = expected.keys() & tokens.keys()
    slots, unit = (known, expected) if known else (seconds.keys() & tokens.keys(), seconds)
    per_token = sum(unit[slot] for slot in slots) / max(1, sum(tokens[slot] for slot in slots))
    costs = {slot: expected.get(slot, per_token * n) for slot, n in tokens.items()}
    paces: dict[int, Pace] = {}
    for rank, (of_rank, width) in timings.items():
        counted = {slot: s for slot, s in of_rank.items() if min(costs.get(slot, 0.0), s) > NOTHING_S}
        if counted:  # one group that took very long says little of its rank: so not the mean
            pace = geometric_mean(costs[slot] / s for slot, s in counted.items())
            busy_s = sum(counted.values())
            paces[rank] = Pace(round(pace * busy_s, 4), round(busy_s, 4), width)
            costs |= {slot: pace * s for slot, s in counted.items()}
    return costs, paces


def updated_paces(before: Mapping[int, Pace], latest: Mapping[int, Pace]) -> dict[int, Pace]:
    """Return the paces known after a phase, in which the ranks of `latest` have made groups.

    A rank that has made nothing is believed to be faster by and by, until it is the fastest or gets a group
    again: what was measured in a bad moment would else keep work from it for ever.
    """
    known = dict(latest or before)
    for rank, pace in before.items():
        if rank not in known:
            best = max(pace.per_group, *(other.per_group for other in latest.values()))
            busy_s = max(pace.busy_s / FORGIVEN, pace.work / best)
            known[rank] = Pace(pace.work, round(busy_s, 3), pace.width)
    return known


def rates(ranks: Sequence[int] | Mapping[int, Any], paces: Mapping[int, Pace]) -> dict[int, float]:
    """Return the rate of each of `ranks`; one whose pace nobody knows is taken for an average one."""
    known = {rank: paces[rank].rate for rank in ranks if rank in paces}
    usual = sum(known.values()) / len(known) if known else 1.0
    return {rank: known.get(rank, usual) for rank in ranks}


def measured_weights(paces: Mapping[int, Pace]) -> dict[int, float]:
    """Return the rate of each rank whose pace is known, the slowest being 1."""
    known = rates(paces, paces)
    return {rank: round(rate / min(known.values()), 2) for rank, rate in sorted(known.items())}


def cut_into_chunks(
    slots: Sequence[int], costs: Mapping[int, float], ranks: Sequence[int], paces: Mapping[int, Pace]
) -> Chunks:
    """Cut `slots` into chunks for `ranks`. `costs` by slot: what is expected; a slot without one is taken
    for an average one. Without any cost the order stays.
    """
    usual = sum(costs.values()) / len(costs) if costs else 1.0
    cost = {slot: costs.get(slot, usual) for slot in slots}
    order = sorted(slots, key=lambda slot: -cost[slot]) if costs else list(slots)
    limit = len(slots) if costs else math.ceil(len(slots) / UNKNOWN_FRACTION)
    rate = rates(ranks, paces)
    chunks: list[Chunk] = []
    first: dict[int, int] = {}
    begin, total, reached = 0, sum(cost.values()), 0.0
    left_rate, bound = sum(rate.values()), 0.0
    for rank in sorted(ranks, key=lambda rank: (-pace_of(rank, paces), rank)):
        first[rank] = len(chunks)
        bound += rate[rank] / left_rate * total
        end = begin
        while end < len(order) and reached + cost[order[end]] / 2 <= bound:
            reached += cost[order[end]]
            end += 1
        chunks += _place(order[begin:end], cost, limit, paces.get(rank))
        begin = end
    return Chunks(chunks + _decreasing(order[begin:], cost, limit), first, dict(paces))


def with_guests(paces: Mapping[int, Pace], guests: Collection[int]) -> dict[int, Pace]:
    """Return paces also for `guests` that are not measured yet: they count as the slowest rank."""
    slowest = min(paces.values(), key=lambda pace: pace.rate, default=None)
    new = {guest: slowest for guest in guests if guest not in paces and slowest is not None}
    return {**paces, **new}


def pace_of(rank: int, paces: Mapping[int, Pace]) -> float:
    """Return the cost a second of one group on `rank`, an average one if it is not known."""
    if rank in paces:
        return paces[rank].per_group
    return sum(pace.per_group for pace in paces.values()) / len(paces) if paces else 1.0


def _place(slots: Sequence[int], cost: Mapping[int, float], limit: int, pace: Pace | None) -> list[Chunk]:
    """Cut a rank's place. If the rank may have all of it in flight at once, it is one chunk: all would be
    claimed at once anyway, and the engine gets them together.
    """
    if pace is None or not 0 < len(slots) <= pace.width:
        return _decreasing(slots, cost, limit)
    return [Chunk(list(slots), [cost[slot] for slot in slots])]


def _decreasing(slots: Sequence[int], cost: Mapping[int, float], limit: int) -> list[Chunk]:
    """Cut a place: each chunk has about 1 / CHUNK_FRACTION of the work left, one slot at least, and at most
    `limit`.
    """
    chunks: list[Chunk] = []
    begin, remaining = 0, sum(cost[slot] for slot in slots)
    while begin < len(slots):
        end, work = begin + 1, cost[slots[begin]]
        last = min(len(slots), begin + limit)
        while end < last and work + cost[slots[end]] <= remaining / CHUNK_FRACTION:
            work += cost[slots[end]]
            end += 1
        chunks.append(Chunk(list(slots[begin:end]), [cost[slot] for slot in slots[begin:end]]))
        begin, remaining = end, remaining - work
    return chunks


class RankLoad(NamedTuple):
    """What a rank knows of itself when it chooses."""

    open_work: float
    """Costs of its groups that are claimed and have not ended, added up, as expected."""
    pace: float | None
    """Its cost a second of one group in this phase; None while no group of it has ended."""
    still_s: float
    """For how long nobody has claimed anything."""
    width: int
    """How many groups it may have in flight at once."""


def choose_chunks(
    chunks: Chunks, rank: int, free: Sequence[int], me: RankLoad, lost: Collection[int] = ()
) -> list[int]:
    """Return which of the chunks `free` a rank may claim now, the best first; empty: none, for now.

    A rank holds no more open work than its share of all, to within a group. So while everybody may have
    everything in flight at once, the slow ones leave the fast ones theirs, and one that is early leaves the
    others their places; and a rank of which nothing is known takes half of that, until its first group has
    ended.

    A rank takes no chunk that it would finish later than the others could if they first made all else that
    is free. For as long as nobody claims anything they are believed to be slower by that time: so every
    chunk is taken in the end, whatever has become of the others. Those that are `lost` get nothing.

    A guest of which the plan knows nothing begins at the end of the list, and counts as slow until its first
    group has ended.
    """
    rate = {other: speed for other, speed in chunks.rates().items() if other == rank or other not in lost}
    is_stranger = rank not in chunks.first
    if is_stranger:
        rate[rank] = me.pace * me.width if me.pace else min(rate.values(), default=1.0)
    total = sum(chunk.work for chunk in chunks.chunks)
    share = rate[rank] / sum(rate.values()) * total
    if rank not in chunks.paces and me.pace is None and len(rate) > 1:
        share /= 2

    def has_room(chunk: Chunk) -> bool:
        more = me.open_work + chunk.work
        return not me.open_work or (me.open_work < share and more <= share + chunk.dearest)

    first = chunks.first.get(rank, 0)
    ordered = [number for number in free if number >= first]
    ordered += [number for number in free if number < first]
    if is_stranger:
        ordered.reverse()
    ordered = [number for number in ordered if has_room(chunks.chunks[number])]
    slowest = min((pace.per_group for pace in chunks.paces.values()), default=1.0)
    pace = me.pace or (slowest if is_stranger else pace_of(rank, chunks.paces))
    other_rates = {other: speed for other, speed in rate.items() if other != rank}
    if not chunks.paces.keys() & other_rates.keys():
        return ordered
    best = max(pace_of(other, chunks.paces) for other in other_rates)
    others_s = sum(chunks.chunks[number].work for number in free) / sum(other_rates.values())

    def is_for_me(chunk: Chunk) -> bool:
        mine_s = max(chunk.dearest / pace, chunk.work / (pace * me.width))
        return mine_s <= others_s + chunk.dearest / best + me.still_s

    return [number for number in ordered if is_for_me(chunks.chunks[number])]
