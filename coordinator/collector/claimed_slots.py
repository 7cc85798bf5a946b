"""The slots of a share that grows: its node claims chunk after chunk while the rollout goes on."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from coordinator.collector.guest_chunks import Contribution, GuestChunks, GuestContributions, OwnChunks
from coordinator.directory.claims import Claims
from coordinator.protocol.chunks import Chunk, Chunks, RankLoad, choose_chunks
from rollout.engine_places import Meter
from rollout.slots import Slot
from rollout.trajectory import Group

FIRST_PAUSE_S = 0.02
SLOWER = 1.3
"""A node that leaves a chunk to others looks again later and later, by this factor."""


class ClaimedSlots:
    """Gives out the slots that this node claims, chunk by chunk.

    It is asked for one slot after the other (`take`), and claims the next chunk when it has none left; at the
    end one spare slot after the other. The slots that the node has in flight from before count as needed too.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        claims: Claims,
        rank: int,
        in_flight: int,
        again: Sequence[Slot],
        slots_of: Callable[[Sequence[int]], Awaitable[list[Slot]]],
        meter: Meter,
        pause_s: float,
        on_look: Callable[[], None],
        lost: Callable[[], Collection[int]] = tuple,
        rest_of: Callable[[Chunk], tuple[list[int], Contribution]] | None = None,
        guests: GuestChunks | None = None,
        own_chunks: OwnChunks | None = None,
    ) -> None:
        """Claim by a `plan` with chunks (see `rollout_steps.plan`).

        - `in_flight`: how many slots the node has in flight
        - `again`: the slots it begins with
        - `slots_of`: reads the tasks of slots
        - `meter`: how fast this node is
        - `pause_s`: the longest pause between two looks at the claims, each of which calls `on_look`
        - `lost`: which ranks are lost
        - `rest_of`: looks what a guest has left of a chunk
        - `guests`: the master's view of guests; None for others
        - `own_chunks`: those of a guest; None for others
        """
        self._chunks = Chunks.from_json(plan)
        self._spare: list[int] = [] if own_chunks else list(plan["spare"])
        self._count = len(self._chunks.chunks) + len(plan["spare"])
        self._rest_of = rest_of
        self._guests = guests
        self._own_chunks = own_chunks
        self.from_guests = GuestContributions()
        """What guests have made that this node rests on."""
        self._claims = claims
        self._rank = rank
        self._slots_of = slots_of
        self._meter = meter
        self._pause_s = pause_s
        self._on_look = on_look
        self._lost = lost
        self._queue = deque(again)
        self._costs = self._chunks.costs()
        self._work: dict[int, float] = {}
        """By slot: the expected cost of what is claimed here and has not ended."""
        self._still_since_s: float | None = None
        self._free = {chunk: chunk for chunk in range(len(self._chunks.chunks))}
        """The chunks that nobody has claimed, and the number by which each can be."""
        self._mine: set[int] = set()
        """The numbers claimed here, which stay so when a newer epoch has removed the claims."""
        self._lock = asyncio.Lock()
        self._leaves = False
        self.waited_s = 0.0
        """Seconds in which this node had nothing to make, and left to others what was free."""
        self.needed = in_flight + len(again)
        self._late = 0
        """Needed groups that guests still make while nothing is free. Nobody waits for them for longer than
        for late groups of nodes (completion_threshold).
        """
        self._has_more = bool(self._free)
        self.total = len(again) + sum(len(chunk.slots) for chunk in self._chunks.chunks) + len(self._spare)

    @property
    def expected(self) -> int:
        """How many groups this node will have claimed in the end, if all are as fast as is known."""
        rate = self._chunks.rates()
        free_slots = sum(len(self._chunks.chunks[number].slots) for number in self._free)
        return self.needed - self._late + round(free_slots * rate.get(self._rank, 0.0) / sum(rate.values()))

    @property
    def is_open(self) -> bool:
        """Whether further slots may come that this node has to make."""
        return self._has_more and not self._late

    @property
    def has_spare(self) -> bool:
        """Whether this node has not yet seen that all spare slots are claimed."""
        return bool(self._spare)

    async def take(self, wants_spare: Callable[[], bool]) -> Slot | None:
        """Return the next slot, of a chunk that is claimed now if need be; None when all are claimed.
        A spare one is claimed if `wants_spare`.
        """
        async with self._lock:  # the others wait for the same answer
            while not self._queue and self._has_more:
                await self._claim()
            if not self._queue and wants_spare():
                await self._claim_spare()
            return self._queue.popleft() if self._queue else None

    def end(self, group: Group) -> None:
        """Hear that a group has ended."""
        self._work.pop(group.slot, None)

    def leave(self) -> None:
        """Claim nothing more, and give out no slot: this guest goes when its groups in flight have ended."""
        self._leaves = True
        self._has_more = False
        self.needed -= len(self._queue)
        self._queue.clear()

    async def _claim(self) -> None:
        """Claim a chunk, if it is this node's turn."""
        pause_s = FIRST_PAUSE_S
        while await self._look() and not self._leaves:
            number = None
            chosen = choose_chunks(self._chunks, self._rank, list(self._free), self._standing(), self._lost())
            if chosen:
                number = await asyncio.to_thread(self._claims.take, [self._free[chunk] for chunk in chosen])
            if number is not None:
                self._mine.add(number)
                await self._give(number)
                return
            if not chosen:
                self.waited_s += 0.0 if self._work else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(SLOWER * pause_s, self._pause_s)
        self._has_more = False

    async def _look(self) -> bool:
        """List what is claimed; returns whether anything is free."""
        shown = await asyncio.to_thread(self._claims.look)
        claimed = self._mine | shown.claimed
        numbers = {chunk: shown.number(chunk, self._count) for chunk in range(len(self._chunks.chunks))}
        free = {chunk: number for chunk, number in numbers.items() if number not in claimed}
        now_s = asyncio.get_running_loop().time()
        if self._still_since_s is None or free != self._free:
            self._still_since_s = now_s
        self._free = free
        self._on_look()
        if self._guests is None:
            return bool(free)
        claimed_by_others = [number for number in numbers.values() if number in claimed - self._mine]
        looking = (claimed_by_others, shown, self.from_guests, not free)
        making, uncounted = await asyncio.to_thread(self._guests.look, *looking)
        late = 0 if free else sum(len(self._chunks.chunks[number % self._count].slots) for number in making)
        self.needed += uncounted + late - self._late
        self._late = late
        return bool(free or making)

    def _standing(self) -> RankLoad:
        now_s = asyncio.get_running_loop().time()
        still_s = now_s - self._still_since_s if self._still_since_s is not None else 0.0
        return RankLoad(sum(self._work.values()), self._meter.pace(self._costs), still_s, self._meter.width)

    async def _give(self, number: int) -> None:
        """Take up the slots of a chunk that is claimed, without those that a guest has finished."""
        chunk = self._chunks.chunks[number % self._count]
        slots, contribution = chunk.slots, Contribution()
        if number >= self._count and self._rest_of is not None:
            slots, contribution = await asyncio.to_thread(self._rest_of, chunk)
        if self._own_chunks is not None:
            await asyncio.to_thread(self._own_chunks.begin, number, slots, contribution)
        else:
            self.from_guests.parts |= contribution.parts
            self.needed += contribution.uncounted
        if self._leaves:  # since the chunk was claimed: it is given back
            return
        self._queue.extend(await self._slots_of(slots))
        costs = zip(chunk.slots, chunk.costs, strict=True)
        self._work |= {slot: cost for slot, cost in costs if slot in slots}
        self.needed += len(slots)

    async def _claim_spare(self) -> None:
        """Claim one spare slot, if any is left."""
        first = len(self._chunks.chunks)
        while self._spare:
            claimed = self._mine | (await asyncio.to_thread(self._claims.look)).claimed
            free = [first + k for k in range(len(self._spare)) if first + k not in claimed]
            if not free:
                self._spare = []
                return
            number = await asyncio.to_thread(self._claims.take, free)
            if number is not None:
                self._mine.add(number)
                self._queue.extend(await self._slots_of([self._spare[number - first]]))
                return
