"""Steps that the rollouts of training and evaluation share: plan slots, collect a share, aggregate."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from coordinator.directory import manifests, parts, published
from coordinator.directory.layout import Kind
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases.collecting import key_of
from coordinator.protocol.chunks import (
    Chunks,
    cut_into_chunks,
    made_of,
    measured,
    paces_of,
    updated_paces,
    with_guests,
)
from coordinator.protocol.split_slots import split_slots
from rollout.collect import AllGivenUp
from rollout.origin import Origin
from rollout.quota import Quota
from rollout.storage import once
from rollout.tally import amount
from rollout.trajectory import Group, group_length

log = logging.getLogger(__name__)


def plan(
    node: Node, iteration: Iteration, kind: Kind, quota: Quota, origin: Origin, order: Sequence[int]
) -> Payload:
    """Say who makes the slots that no part of `origin` holds yet; slot k is task `order[k]`. What was given
    up before this master has started is made again: the code, or what it needs, may have been mended.

    The keys of the plan; ranks are texts, as JSON writes them:

    - `short`: how many groups are needed beyond the slots left
    - `kept`: by rank, the slots that it has in flight from the epoch before
    - `shares`, where slots are split by weight: by rank, its slots in their order, spare ones last
    - `needed`, where slots are split by weight: by rank, how many groups of its share it is to make
    - `chunks`, `first`, `paces` (protocol.chunks.Chunks) and `spare`, where slots are claimed
    """
    directory = node.run_dir.trajectories(kind, iteration.number)
    started_after = node.identity.newest_epoch
    finished = parts.finished_groups(directory, origin, started_after) if quota.slots else {}
    missing = quota.missing(finished.values())
    if finished:
        log.info("%d of %d groups are finished already", quota.needed - missing, quota.needed)
    unfinished = [slot for slot in range(quota.slots) if slot not in finished]
    short = max(0, missing - len(unfinished))
    going_on = _kept(node, key_of(node, iteration, kind), unfinished, missing)
    in_flight = {slot for slots in going_on.values() for slot in slots}
    # A slot in flight stays with its rank: given to another one as well, it would be made twice.
    free = [slot for slot in unfinished if slot not in in_flight]
    count = min(missing, len(unfinished)) - len(in_flight)
    needed, spare = free[:count], free[count:] if missing else []
    promises = {"short": short, "kept": {str(rank): slots for rank, slots in going_on.items()}}
    have = {rank: len(slots) for rank, slots in going_on.items()}
    return {**split(node, iteration, kind, needed, spare, order, have), **promises}


def split(
    node: Node,
    iteration: Iteration,
    kind: Kind,
    needed: Sequence[int],
    spare: Sequence[int],
    order: Sequence[int],
    have: Mapping[int, int] = MappingProxyType({}),
) -> Payload:
    """Say who makes the slots of `needed`, and of `spare` if it comes to that; `have`, by rank: how many more
    it has in flight. See `plan`.
    """
    members = node.record.members
    guests = node.guests.present() if node.settings.claims else set[int]()
    if node.settings.claims:  # one node alone too: a guest may come
        history = node.histories[kind]
        costs = history.costs(iteration.number, order)
        costs = {slot: costs[slot] for slot in needed if slot in costs}
        paces = with_guests(paces_of(history.paces(iteration.number)), guests)
        chunks = cut_into_chunks(needed, costs, sorted({*members, *guests}), paces)
        return {**chunks.as_json(), "spare": list(spare)}
    weights = {rank: member.weight for rank, member in members.items()}
    shares, of_spare = split_slots(needed, weights, have), split_slots(spare, weights)
    return {
        "shares": {str(rank): share + of_spare[rank] for rank, share in shares.items()},
        "needed": {str(rank): len(share) for rank, share in shares.items()},
    }


def own_places(plan: Payload) -> dict[str, list[int]]:
    """Return, by rank, the slots of a plan that it begins with: its share, or its own place in the chunks."""
    if "shares" in plan:
        return plan["shares"]
    chunks = Chunks.from_json(plan)
    first = sorted(chunks.first.items(), key=lambda item: item[1])
    ends = [number for _, number in first[1:]] + [len(chunks.chunks)]
    return {
        str(rank): [slot for chunk in chunks.chunks[begin:end] for slot in chunk.slots]
        for (rank, begin), end in zip(first, ends, strict=True)
    }


def _kept(node: Node, key: str, unfinished: Collection[int], most: int) -> dict[int, list[int]]:
    """Return, by rank, the slots of `unfinished` that are in flight there with what `key` stands for; `most`
    of them at most, and each once.
    """
    by_rank: dict[int, list[int]] = {}
    free = set(unfinished)
    for rank, in_flight in sorted(node.promised.items()):
        slots = (
            [slot for slot in in_flight.get("slots", ()) if slot in free]
            if in_flight.get("key") == key
            else []
        )
        slots = slots[:most]
        most -= len(slots)
        free -= set(slots)
        by_rank |= {rank: slots} if slots else {}
    return by_rank


def sum_short(plan: Payload, payloads: dict[int, Payload]) -> Payload:
    """Count the needed groups that are not made, for want of slots, and by all nodes together; and join
    what the nodes say of the groups that they have made.
    """
    short = plan["short"] + sum(payload["short"] for payload in payloads.values())
    if short:
        log.warning(
            "%s short: the grace period was over, or the spare tasks were used up",
            amount(short, "groups", "are"),
        )
    timings = {str(rank): payload["made"] for rank, payload in payloads.items() if "made" in payload}
    from_guests = [payload["from_guests"] for payload in payloads.values() if "from_guests" in payload]
    for share in from_guests:
        timings |= share["timings"]
    named = {name: sha256 for share in from_guests for name, sha256 in share["parts"].items()}
    return {"short": short, "made": timings, "named": named}


def aggregate(
    node: Node,
    iteration: Iteration,
    kind: Kind,
    quota: Quota,
    origin: Origin,
    totals: Payload,
    named: Payload,
    order: Sequence[int],
    scores: Callable[[Sequence[Group]], Mapping[str, Any]] = lambda _groups: {},
) -> None:
    """Publish the manifest over the parts of `origin` that flags have `named`, and guests, and those that are
    listed; `totals` is what `sum_short` has returned. What it says is expected of the next iterations.
    `scores`: what else it says of the groups.
    """
    path = node.run_dir.manifest(kind, iteration.number)
    if manifest := published.read_json(path):
        if kind == "train" or manifest["policy"] == origin.policy:
            return
        once.withdraw(path, path.with_suffix(f".{manifest['policy']}"))  # of a policy that is not this one
    elif path.name in published.names(path.parent) and published.read_json(path) is None:
        log.error("%s cannot be read: it is set aside as .damaged, and made anew from the parts", path)
        once.withdraw(path, path.with_suffix(".damaged"))
    directory = node.run_dir.trajectories(kind, iteration.number)
    named = {**totals["named"], **named}
    document, groups = manifests.manifest(directory, iteration.number, quota, origin, named, totals["short"])
    _refuse_tombstones_alone(
        document, is_needed=kind == "train" or node.settings.rollout_split == "eval-only"
    )
    history = node.histories[kind]
    tokens = {group.slot: max(1, group_length(group)) for group in groups if group.samples}
    costs, paces = measured(made_of(totals["made"]), tokens, history.known_costs(iteration.number, order))
    document["costs"] = {str(slot): round(cost, 4) for slot, cost in costs.items()}
    paces = updated_paces(paces_of(history.paces(iteration.number)), paces)
    # A rank that has left the run counts for nothing any more.
    ranks = {*node.record.members, *(node.guests.present() if node.settings.claims else ())}
    document["paces"] = {str(rank): list(pace) for rank, pace in paces.items() if rank in ranks}
    history.add(iteration.number, order, document)
    if document["mixed_code"]:
        log.warning("%s: %d groups were made with other code than the first", path, document["mixed_code"])
    document |= scores(groups)
    manifests.publish_manifest(path, document, groups)


def _refuse_tombstones_alone(manifest: Mapping[str, Any], is_needed: bool) -> None:
    """Raise AllGivenUp as one node does, however few they are: nothing can be learnt from such an iteration,
    and the next start makes them again. Of an evaluation beside training say so: it has no score.
    """
    given_up = manifest["given_up"]
    if given_up and not manifest["groups"] and not manifest["unfinished"]:
        first = given_up[0]
        text = f"all {len(given_up)} groups were given up, e.g. {first['reason']}"
        if is_needed:
            raise AllGivenUp(text)
        log.error("this evaluation has no score, training goes on: %s", text)
