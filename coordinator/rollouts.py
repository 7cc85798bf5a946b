"""What the rollouts of training and of evaluation share: plan the slots, collect a share, aggregate."""

import asyncio
import logging
from collections.abc import Sequence

from coordinator import outputs, parts, shared_fs
from coordinator.node import Node, Payload
from coordinator.outputs import Incomplete
from coordinator.run_dir import Kind
from coordinator.split import split_slots
from rollout.collect import Slot, Stopped, collect
from rollout.engine import EngineClient, Sampling
from rollout.tasks import TaskSet, group_seed
from rollout.trajectory import Group

log = logging.getLogger(__name__)


def plan(node: Node, kind: Kind, slots: int) -> dict[str, list[int]]:
    """The slots that no part holds yet, by rank (as JSON writes it), split by weight."""
    directory = node.run_dir.trajectories(kind, node.iteration)
    finished = parts.finished_slots(directory, node.header["policy"])
    if finished:
        log.info("%d of %d groups are finished already", len(finished), slots)
    left = [slot for slot in range(slots) if slot not in finished]
    weights = {rank: member.weight for rank, member in node.record.members.items()}
    return {str(rank): share for rank, share in split_slots(left, weights).items()}


def collect_share(
    node: Node, kind: Kind, share: list[int], order: Sequence[int], tasks: TaskSet, sampling: Sampling
) -> None:
    """Generate the groups of `share`, and make them durable as they finish. Slot k is task `order[k]`."""
    node.progress(0, len(share))
    if not share:
        return
    policy = node.policy(node.header["policy_iteration"])
    if policy.digest != node.header["policy"]:
        raise Incomplete(
            f"{policy.directory} holds policy {policy.digest} here, but {node.header['policy']} on the "
            "master; give all nodes the same model"
        )
    node.engine.ensure(policy, node.settings.engine, node.check)
    settings = node.settings.rollout
    place = (kind, node.iteration, node.rank, node.record.epoch, policy.digest)
    writer = parts.PartWriter(node.run_dir, *place, settings.part_interval_s)
    slots = [
        Slot(slot, tasks.tasks[order[slot]], group_seed(settings.seed, kind, node.iteration, slot))
        for slot in share
    ]
    try:
        asyncio.run(_collect(node, slots, sampling, writer))
    except Stopped:
        node.check()
        raise
    finally:
        node.persist(writer.flush)


async def _collect(node: Node, slots: list[Slot], sampling: Sampling, writer: parts.PartWriter) -> None:
    """Collect the slots; meanwhile make finished groups durable, and keep the engine alive."""
    settings = node.settings.rollout

    def on_group(group: Group) -> None:
        writer.add(group)
        node.progress(writer.done, len(slots))

    async def flush_regularly() -> None:
        while True:  # a long tail must not keep back what is finished
            await asyncio.sleep(settings.part_interval_s)
            writer.flush()

    async def collect_all() -> None:
        engine = node.settings.engine
        patience_s = node.engine.restart_patience_s(engine)
        async with EngineClient(
            node.engine.url, request_timeout_s=engine.request_timeout_s, retry_s=patience_s
        ) as client:
            await collect(
                slots,
                client=client,
                environment=node.inputs.environment,
                reward=node.inputs.reward,
                sampling=sampling,
                concurrency=settings.concurrency,
                group_timeout_s=settings.group_timeout_s,
                on_group=on_group,
                stop=node.watch.stop,
            )

    collecting = asyncio.create_task(collect_all())
    minding = [
        asyncio.create_task(flush_regularly()),
        asyncio.create_task(node.engine.mind(node.settings.engine, node.check)),
    ]
    try:
        done, _ = await asyncio.wait([collecting, *minding], return_when=asyncio.FIRST_COMPLETED)
        for task in [collecting] if collecting in done else done:
            task.result()
    finally:
        for task in (collecting, *minding):
            task.cancel()
        await asyncio.gather(collecting, *minding, return_exceptions=True)


def aggregate(node: Node, kind: Kind, slots: int, named: Payload) -> None:
    """Publish the manifest over the parts, those that flags have named and those that lie there."""
    path = node.run_dir.manifest(kind, node.iteration)
    if found := outputs.read_json(path):
        if kind == "train" or found["policy"] == node.header["policy"]:
            return
        shared_fs.rename(path, path.with_suffix(f".{found['policy']}"))  # of a policy that is not this one
    elif path.name in outputs.names(path.parent) and outputs.read_json(path) is None:
        log.error("%s cannot be read: it is set aside as .damaged, and made anew from the parts", path)
        shared_fs.rename(path, path.with_suffix(".damaged"))
    directory = node.run_dir.trajectories(kind, node.iteration)
    document = parts.manifest(directory, node.iteration, range(slots), node.header["policy"], named)
    parts.publish_manifest(path, document)
