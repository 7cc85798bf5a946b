"""The groups of an order to collect: they are made, and made durable as they are finished."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.collector import unfinished_samples
from coordinator.collector.claimed_slots import ClaimedSlots
from coordinator.collector.guest_chunks import GuestChunks, GuestsPresent, OwnChunks, rest_of
from coordinator.collector.order import Order
from coordinator.directory.claims import Claims
from coordinator.directory.layout import GUESTS, MASTER, RunDir
from coordinator.directory.parts import PartWriter
from rollout.collect import OURS, GroupCollector
from rollout.engines.answers import EngineError
from rollout.slots import ListedSlots, Slot, SlotSource
from rollout.trajectory import Group, generated_tokens

log = logging.getLogger(__name__)


@dataclass
class NodeSide:
    """The node of a collector: how it is spoken to, and what it has said of the phase."""

    send: Callable[[Mapping[str, Any]], None]
    ask: Callable[[str, Any], Awaitable[Any]]
    """Returns the node's answer to a question about something."""
    step: Callable[[], None]
    """Hears that the order gets on."""
    stop: threading.Event = field(default_factory=lambda: threading.Event())
    """Set when no further group is to be begun."""
    others_are_done: bool = False
    """Whether all other nodes have made their shares of the phase."""
    lost: list[int] = field(default_factory=list[int])
    """The ranks that are lost, as the node sees it."""
    guests: dict[int, int] = field(default_factory=dict[int, int])
    """The guests that are there, as the master sees it, and the incarnation of each."""

    def begin(self) -> None:
        """Take in that an order begins, of whose phase nothing is known yet."""
        self.stop.clear()
        self.others_are_done, self.lost, self.guests = False, [], {}


class Collection:
    """One order to collect: where its slots come from, and where its finished groups go."""

    def __init__(self, order: Order, node: NodeSide, collector: GroupCollector) -> None:
        self._order = order
        self._node = node
        self._collector = collector
        self._run_dir = RunDir(Path(order.root), order.crew)
        place = (order.kind, order.iteration, order.rank, order.epoch, order.origin)
        self._writer = PartWriter(self._run_dir, *place, order.first_part)
        self._own_chunks: OwnChunks | None = None
        """A guest's chunks."""
        self._claimed: ClaimedSlots | None = None

    async def run(self) -> dict[str, Any]:
        """Make the groups, and make them durable as they are finished; returns how the order has ended."""
        collecting, flushing = own_task(self._make_all()), own_task(self._flush_regularly())
        try:
            await asyncio.wait({collecting, flushing}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                flushing.result()  # raises: it never ends by itself
            return collecting.result()
        finally:
            for task in (collecting, flushing):
                task.cancel()
            await asyncio.gather(collecting, flushing, return_exceptions=True)

    def leave(self) -> None:
        """Claim nothing more; see ClaimedSlots.leave."""
        if self._claimed is not None:
            self._claimed.leave()

    async def _make_all(self) -> dict[str, Any]:
        order, node, collector = self._order, self._node, self._collector
        counted = tokens = 0
        source: SlotSource = ListedSlots([])

        def show(slot: int | None = None) -> None:
            total = source.expected if isinstance(source, ClaimedSlots) else source.needed
            node.send({"reached": [counted, total, tokens], "made": slot})

        def on_group(group: Group) -> None:
            nonlocal counted, tokens
            self._writer.add(group)
            tokens += generated_tokens(group, order.iteration)
            counted += order.quota.counts(group)
            show(group.slot)

        collector.keep(order.in_flight)
        in_flight = len(collector.open_slots)
        # What the plan leaves with this node must be made in any case.
        again = sorted({*order.in_flight, *order.again} - {*collector.open_slots, *order.given_up})
        given_up = await slots_of(order, node, list(order.given_up))
        for slot in given_up:
            on_group(slot.tombstone(order.given_up[slot.number]))
        alone = [slot for slot in again if slot in order.alone]
        for slot in await slots_of(order, node, alone):
            node.send({"alone": slot.number})
            source = ListedSlots([slot])
            await collector.run(source, on_group, node.stop)
        node.send({"alone": None})
        source = await self._source(in_flight, [slot for slot in again if slot not in alone])
        show()  # the start of an engine is no part of the speed

        def made_elsewhere() -> int:
            return max(0, order.quota.needed - source.needed) if node.others_are_done else 0

        collector.made_elsewhere = made_elsewhere
        try:
            short = await collector.run(source, on_group, node.stop, in_flight)
        finally:
            if isinstance(source, ClaimedSlots):
                node.send({"waited_s": source.waited_s})
        node.send({"reached": [counted, source.needed, tokens], "made": None})
        for slot in given_up:
            log.warning("the group of task %r is given up: %s", slot.task_id, order.given_up[slot.number])
        seconds = {str(slot): round(taken_s, 4) for slot, taken_s in collector.meter.seconds.items()}
        from_guests = source.from_guests if isinstance(source, ClaimedSlots) else None
        return {
            "short": short,
            **({"made": [seconds, collector.meter.width]} if seconds else {}),
            **({"from_guests": asdict(from_guests)} if from_guests and from_guests.parts else {}),
        }

    async def _source(self, in_flight: int, again: Sequence[int]) -> SlotSource:
        """Return the Source of the order's slots, those of `again` first; `in_flight` are in flight."""
        order, node, meter = self._order, self._node, self._collector.meter
        if order.claimed is None:
            slots = await slots_of(order, node, [*again, *order.slots])
            return ListedSlots(slots, len(again) + order.needed, in_flight)
        claims = Claims(
            self._run_dir, order.epoch, order.iteration, order.phase, order.rank,
            lambda path: node.send({"claimed": str(path)}), order.incarnation,
        )  # fmt: skip
        first, counts, guests = await slots_of(order, node, again), order.quota.counts, None
        if order.rank == MASTER:
            presence = lambda: GuestsPresent(node.lost, node.guests)  # noqa: E731
            guests = GuestChunks(claims, presence, order.guest_patience_s)
        if order.rank >= GUESTS:
            await asyncio.to_thread(claims.take_part, order.rank)
            self._own_chunks = OwnChunks(claims, meter, counts)
        directory = self._run_dir.trajectories(order.kind, order.iteration)
        self._claimed = ClaimedSlots(
            order.claimed, claims, order.rank, in_flight, first, partial(slots_of, order, node), meter,
            order.claim_pause_s, node.step, lambda: node.lost,
            lambda chunk: rest_of(chunk, directory, order.origin, counts), guests, self._own_chunks,
        )  # fmt: skip
        return self._claimed

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._order.settings.part_interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what is finished, and tell the node which groups are durable."""
        if not self._writer.is_waiting:
            return
        if (refused := await self._node.ask("verify", None)) is not None:
            raise EngineError(refused)
        written = await asyncio.to_thread(self._writer.flush)  # on a slow filesystem an fsync takes seconds
        if written is None:
            return
        if self._own_chunks is not None:
            await asyncio.to_thread(self._own_chunks.make_durable, written)
        counted = sum(map(self._order.quota.counts, written.groups))
        self._node.send({"durable": [group.slot for group in written.groups], "counted": counted})


async def slots_of(order: Order, node: NodeSide, numbers: Sequence[int]) -> list[Slot]:
    """Ask the node what slots are, and read what the iteration before has made of them."""
    if not numbers:
        return []
    answers: list[dict[str, Any]] = await node.ask("slots", list(numbers))
    run_dir = RunDir(Path(order.root), order.crew)
    groups: dict[int, Group] = {}
    if order.begun:
        groups = await asyncio.to_thread(
            unfinished_samples.read, run_dir, order.iteration, order.begun, list(numbers)
        )
    return [Slot(**fields, begun=groups.get(fields["number"])) for fields in answers]


def own_task(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Run a coroutine of this program as a task that is none of an environment's."""
    return asyncio.create_task(work, name=OURS)
