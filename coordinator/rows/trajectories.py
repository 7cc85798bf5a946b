"""What the rollouts of training and evaluation have in common: plan slots, collect a share, aggregate."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from coordinator.directory import parts, published
from coordinator.directory.layout import Kind
from coordinator.directory.published import Incomplete
from coordinator.node.flags import Payload
from coordinator.node.inputs import Functions
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.shares import split_slots
from coordinator.rows import prefixes
from coordinator.rows.prefixes import Begun
from coordinator.rows.serving import serve
from rollout.collect import Slot, Stopped, collect
from rollout.engines.client import EngineClient
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.environments.demonstration import demonstration, end_of_sequence
from rollout.environments.environment import Environment, demonstrates, single_turn
from rollout.environments.segments import Segment
from rollout.evaluation import evaluate
from rollout.origin import Origin
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.storage import once
from rollout.tally import Tally
from rollout.tasks.task_set import TaskSet, group_seed
from rollout.trajectory import Group, generated_tokens

log = logging.getLogger(__name__)
_tally = Tally(log)  # of the process: each traceback is shown once, not in each iteration


def plan(node: Node, iteration: Iteration, kind: Kind, quota: Quota, origin: Origin) -> Payload:
    """Split the slots that no part of `origin` holds yet by weight.

    By rank (as JSON writes it): `shares`, its slots in the order in which it takes them, spare ones last;
    `needed`, how many groups of them it is to make. `short`: how many are needed beyond the slots left.
    """
    directory = node.run_dir.trajectories(kind, iteration.number)
    finished = parts.finished_groups(directory, origin) if quota.slots else {}
    missing = quota.missing(finished.values())
    if finished:
        log.info("%d of %d groups are finished already", quota.needed - missing, quota.needed)
    left = [slot for slot in range(quota.slots) if slot not in finished]
    weights = {rank: member.weight for rank, member in node.record.members.items()}
    shares = split_slots(left[:missing], weights)
    spare = split_slots(left[missing:] if missing else [], weights)
    return {
        "shares": {str(rank): share + spare[rank] for rank, share in shares.items()},
        "needed": {str(rank): len(share) for rank, share in shares.items()},
        "short": max(0, missing - len(left)),
    }


@dataclass(frozen=True)
class Share:
    """What a node is to generate: slot k is task `order[k]` of `tasks`."""

    kind: Kind
    slots: list[int]
    needed: int
    quota: Quota
    order: Sequence[int]
    tasks: TaskSet
    origin: Origin
    functions: Functions
    settings: RolloutSettings
    begun: Sequence[Begun] = ()
    """What the first slots go on with."""
    segment: Segment | None = None
    """What the iteration adds to a sample, if that may be less than all of it."""

    @classmethod
    def of(cls, plan: Payload, rank: int, **more: Any) -> Self:
        """Return the share of `rank` in what `plan` has made."""
        return cls(slots=plan["shares"][str(rank)], needed=plan["needed"][str(rank)], **more)


def collect_share(node: Node, iteration: Iteration, share: Share) -> Payload:
    """Generate a share, and make its groups durable as they finish; says how many are short."""
    node.position.reach(0, share.needed)
    if not share.needed:
        return {"short": 0}
    policy = node.policies.of(iteration.header["policy_iteration"])
    if policy.digest != iteration.header["policy"]:
        raise Incomplete(
            f"{policy.directory} holds policy {policy.digest} here, but {iteration.header['policy']} on the "
            "master; give all nodes the same model"
        )
    if _generates(node, share):
        serve(node, policy)
    code = {"reward": share.functions.reward.code, "environment": share.functions.environment_code}
    place = (share.kind, iteration.number, node.rank, node.record.epoch, replace(share.origin, **code))
    verify = node.engine.check_serves
    writer = parts.PartWriter(node.run_dir, *place, verify)
    try:
        with node.unresponsive.guarding(node.children, lambda: writer.is_writing):
            return {"short": asyncio.run(_collect(node, iteration, share, writer))}
    except Stopped:
        node.check()
        raise
    finally:
        node.persist(writer.flush)


async def _collect(node: Node, iteration: Iteration, share: Share, writer: parts.PartWriter) -> int:
    """Collect the share; meanwhile make finished groups durable, and keep the engine alive."""
    counted = tokens = 0
    node.position.reach(0, share.needed)  # again: starting an engine is no part of the speed
    slots = _slots(node, iteration.number, share)

    def on_group(group: Group) -> None:
        nonlocal counted, tokens
        writer.add(group)
        tokens += generated_tokens(group, iteration.number)
        counted += share.quota.counts(group)
        node.position.reach(counted, share.needed, tokens)

    async def flush_regularly() -> None:
        while True:  # in a thread: on a slow filesystem an fsync takes seconds, and all requests go on
            await asyncio.sleep(share.settings.part_interval_s)
            await asyncio.to_thread(writer.flush)

    async def collect_all() -> int:
        async with _client(node, share) as client:
            return await collect(
                slots,
                needed=share.needed,
                counts=share.quota.counts,
                client=client,
                environment=_environment(node, share),
                reward=share.functions.reward,
                sampling=share.origin.sampling,
                settings=share.settings,
                segment=share.segment,
                on_group=on_group,
                on_end=node.position.step,
                stop=node.watch.stop,
                tally=_tally,
            )

    collecting = asyncio.create_task(collect_all())
    minding = [asyncio.create_task(flush_regularly())]
    if _generates(node, share):
        minding.append(asyncio.create_task(node.engine.mind(node.settings.engine, node.check)))
    try:
        done, _ = await asyncio.wait([collecting, *minding], return_when=asyncio.FIRST_COMPLETED)
        if collecting not in done:
            for task in done:
                task.result()  # raises: these never end by themselves
        return collecting.result()
    finally:
        for task in (collecting, *minding):
            task.cancel()
        await asyncio.gather(collecting, *minding, return_exceptions=True)


def _slots(node: Node, iteration: int, share: Share) -> list[Slot]:
    """Return the slots of a share, each with its task, its seed, and what the iteration before has made."""
    groups = prefixes.read(node.run_dir, iteration, share.begun, share.slots)
    slots: list[Slot] = []
    for slot in share.slots:
        first = (iteration, slot - len(share.begun))  # as if nothing had been begun before
        if slot < len(share.begun):
            first = (share.begun[slot].iteration, share.begun[slot].slot)
        seed = group_seed(share.settings.seed, share.kind, *first)
        slots.append(Slot(slot, share.tasks.tasks[share.order[slot]], seed, groups.get(slot)))
    return slots


def _generates(node: Node, share: Share) -> bool:
    """Return whether the share's samples come from the engine."""
    return not demonstrates(_environment(node, share))


def _client(node: Node, share: Share) -> EngineClient:
    """Return what the share's environment asks: the engine, or a tokenizer where nothing is generated."""
    if not _generates(node, share):
        return LocalTokenizer(_start_model(node))
    engine = node.settings.engine
    return EngineClient(
        node.engine.url,
        model=node.engine.model,
        request_timeout_s=engine.request_timeout_s,
        retry_s=node.engine.restart_patience_s(engine),
    )


def _environment(node: Node, share: Share) -> Environment:
    """Return what makes the share's groups.

    Demonstrations end as the model's sequences do. They cannot evaluate a policy: there it answers itself.
    """
    environment = share.functions.environment
    if not demonstrates(environment):
        return environment
    if share.kind == "eval":
        return single_turn
    if environment is not demonstration:
        return environment
    return partial(demonstration, end_ids=end_of_sequence(_start_model(node)))


def _start_model(node: Node) -> Path:
    """Return a directory of this machine with the model that the run started from."""
    return node.policies.hold(node.policies.of(0), node.reading()).directory


def sum_short(plan: Payload, payloads: dict[int, Payload]) -> Payload:
    """Count the needed groups that are not made: for want of slots, and by all nodes together."""
    short = plan["short"] + sum(said["short"] for said in payloads.values())
    if short:
        log.warning("%d groups are short: the grace period was over, or the spare tasks were used up", short)
    return {"short": short}


def aggregate(
    node: Node,
    iteration: Iteration,
    kind: Kind,
    quota: Quota,
    origin: Origin,
    short: int,
    named: Payload,
) -> None:
    """Publish the manifest over the parts of `origin` that flags have named and those that are listed."""
    path = node.run_dir.manifest(kind, iteration.number)
    if found := published.read_json(path):
        if kind == "train" or found["policy"] == origin.policy:
            return
        once.withdraw(path, path.with_suffix(f".{found['policy']}"))  # of a policy that is not this one
    elif path.name in published.names(path.parent) and published.read_json(path) is None:
        log.error("%s cannot be read: it is set aside as .damaged, and made anew from the parts", path)
        once.withdraw(path, path.with_suffix(".damaged"))
    directory = node.run_dir.trajectories(kind, iteration.number)
    document, groups = parts.manifest(directory, iteration.number, quota, origin, named, short)
    if document["mixed_code"]:
        log.warning("%s: %d groups were made with other code than the first", path, document["mixed_code"])
    if kind == "eval":
        document |= evaluate(groups, node.settings.eval.success)
    parts.publish_manifest(path, document, groups)
