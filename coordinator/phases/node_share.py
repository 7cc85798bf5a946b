"""The share of a node in phase 2 or 6, and its slots with their tasks and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory.layout import Kind
from coordinator.node.flags import Payload
from coordinator.phases.eval_sets import SetSlots
from coordinator.start.user_functions import Functions
from rollout.environments.segments import Segment
from rollout.origin import Origin
from rollout.pictures import pictures_in
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.tasks.task_set import TaskSet, group_seed


@dataclass(frozen=True)
class NamedSet:
    """What a node needs for the slots of a named set of an evaluation."""

    slots: SetSlots
    tasks: TaskSet
    functions: Functions


@dataclass(frozen=True)
class Share:
    """What a node is to generate: slot k is task `order[k]` of `tasks`, or one of a named set."""

    kind: Kind
    plan: Payload
    quota: Quota
    order: Sequence[int]
    tasks: TaskSet
    origin: Origin
    functions: Functions
    settings: RolloutSettings
    begun: Sequence[BegunGroup] = ()
    """What the first slots go on with."""
    sets: Sequence[NamedSet] = ()
    """The named sets, by slot."""
    segment: Segment | None = None
    """What the iteration adds to a sample, if that may be less than all of it."""

    def in_flight(self, rank: int) -> list[int]:
        """Return the slots that a rank has in flight from the epoch before."""
        return self.plan["kept"].get(str(rank), [])

    def is_empty(self, rank: int) -> bool:
        """Return whether a rank has nothing to make."""
        more = self.plan["chunks"] if "chunks" in self.plan else self.plan["needed"][str(rank)]
        return not more and not self.in_flight(rank)


def slots_of(iteration: int, share: Share, numbers: Sequence[int]) -> list[Slot]:
    """Return slots of a share, each with its task and its seed."""
    slots: list[Slot] = []
    for slot in numbers:
        first = (iteration, slot - len(share.begun))  # as if nothing had been begun before
        if slot < len(share.begun):
            first = (share.begun[slot].iteration, share.begun[slot].slot)
        seed = group_seed(share.settings.seed, share.kind, *first)
        if eval_set := next(
            (eval_set for eval_set in share.sets if eval_set.slots.begin <= slot < eval_set.slots.end), None
        ):
            slots.append(_of_set(eval_set, share.settings.seed, iteration, slot))
        else:
            slots.append(Slot(slot, share.tasks.tasks[share.order[slot]], seed))
    return slots


def publish_pictures(share: Share, slots: Sequence[Slot], directory: Path) -> None:
    """Write the pictures that slots show, before anybody makes a sample of them. Raises PictureError."""
    sets = [share.tasks, *(eval_set.tasks for eval_set in share.sets)]
    known = [tasks.pictures for tasks in sets if tasks.pictures is not None]
    for slot in slots if known else ():
        for digest in pictures_in(slot.task.get("messages")):
            next(pictures for pictures in known if digest in pictures).publish(digest, directory)


def _of_set(eval_set: NamedSet, run_seed: int, iteration: int, slot: int) -> Slot:
    """Return a slot of a named set. Its seed does not depend on which other sets there are."""
    name, index = eval_set.slots.name, slot - eval_set.slots.begin
    seed = group_seed(run_seed, f"eval/{name}", iteration, index)
    return Slot(slot, eval_set.tasks.tasks[index], seed, kind=name)
