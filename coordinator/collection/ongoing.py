"""The groups that a node has in flight.

What is in flight when an epoch ends goes on in the next one, if that makes the same groups: the event loop of
the collection is not run meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from coordinator.collection import makers
from coordinator.collection.claimed import Claimed
from coordinator.collection.node_share import ROWS, Share, slots_of
from coordinator.directory.claims import Claims
from coordinator.directory.parts import PartWriter
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.chunks import Pace
from rollout.collect import Collector
from rollout.environments.environment import single_turn
from rollout.group_maker import Recipe
from rollout.slots import Listed, Source
from rollout.tally import Tally
from rollout.trajectory import Group, generated_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
OVER_S = 0.02
"""How often a node that generates ahead looks whether the checkpoint is there."""
_tally = Tally(log)  # of the process: each traceback is shown once, not in each iteration


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while nobody runs it: nothing times out meanwhile."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() - self.skipped_s


@asynccontextmanager
async def _beside(*works: Coroutine[Any, Any, Any]) -> AsyncGenerator[list[asyncio.Task[Any]], None]:
    """Run all of `works` as tasks during a block. At its end they are cancelled, and have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Ongoing:
    """The groups that a node has in flight, and the event loop that makes them."""

    def __init__(self, node: Node, share: Share, key: str, iteration: int = 0) -> None:
        self.key = key
        self.iteration = iteration
        self.ahead_s = 0.0
        """For how long groups were made before their row."""
        environment = partial(makers.environment_of, node, share.kind)
        self._client = makers.client_of(node, share)
        self._entered = AsyncExitStack()
        self._runner = asyncio.Runner(loop_factory=_Loop)
        self._left_s: float | None = None
        self._is_open = False
        self._collector = Collector(
            counts=share.quota.counts,
            client=self._client,
            environment=environment(share.functions),
            reward=share.functions.reward,
            sampling=share.origin.sampling,
            settings=share.settings,
            segment=share.segment,
            others={
                one.slots.name: Recipe(environment(one.functions), one.functions.reward, one.slots.sampling)
                for one in share.sets
            },
            on_end=node.position.step,
            tally=_tally,
        )

    @property
    def slots(self) -> list[int]:
        """The slots whose groups are begun and not handed over."""
        return self._collector.open_slots

    def run(self, node: Node, iteration: Iteration, share: Share, writer: PartWriter) -> Payload:
        """Collect a share, with what is in flight of it. Raises Stopped, with the rest kept in flight."""
        return self._run(self._collect(node, iteration, share, writer))

    def begin(
        self, node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]
    ) -> BaseException | None:
        """Make groups of a share until `is_over`, which may raise, and hold them; returns what has gone wrong
        with them.
        """
        return self._run(self._begin(node, iteration, share, is_over))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the event loop, whose clock has stood still since it was left."""
        loop: Any = self._runner.get_loop()
        if self._left_s is not None:
            loop.skipped_s += time.monotonic() - self._left_s
        try:
            return self._runner.run(work)
        finally:
            self._left_s = time.monotonic()
            _tally.say_counts()  # before whatever ends the row is said, which may be the last line of all

    async def _begin(
        self, node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]
    ) -> BaseException | None:
        slots = slots_of(node.run_dir, iteration.number, share, share.plan["shares"][str(node.rank)])
        began_s = time.monotonic()

        async def wait_until_over() -> None:
            while not is_over():
                await asyncio.sleep(OVER_S)
                if self._collector.is_busy:
                    self.ahead_s = time.monotonic() - began_s

        async def make() -> None:
            await self._enter()
            await self._collector.begin(Listed(slots))

        mind = node.engine.mind(node.settings.engine, node.check)
        async with _beside(wait_until_over(), make(), mind) as tasks:
            over = tasks[0]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in done if task is not over), None)
            await over  # raises what ends the row
        return failed

    async def _enter(self) -> None:
        """Open the connections to the engine, once."""
        if not self._is_open:
            self._is_open = True
            await self._entered.enter_async_context(self._client)

    def end(self) -> None:
        """Cancel what is in flight."""

        async def end() -> None:
            await self._collector.end()
            await self._entered.aclose()

        try:
            self._runner.run(end())
        finally:
            self._runner.close()

    async def _collect(self, node: Node, iteration: Iteration, share: Share, writer: PartWriter) -> Payload:
        """Collect; meanwhile make finished groups durable, and keep the engine alive."""
        counted = tokens = 0
        kept = set(share.kept(node.rank))
        self._collector.keep(kept)
        again = sorted(kept - set(self.slots))  # what the plan leaves with this node must be made in any case
        source = self._source(node, iteration, share, len(kept) - len(again), again)

        def show() -> None:
            total = source.expected if isinstance(source, Claimed) else source.needed
            node.position.reach(counted, total, tokens)

        def on_group(group: Group) -> None:
            nonlocal counted, tokens
            writer.add(group)
            tokens += generated_tokens(group, iteration.number)
            counted += share.quota.counts(group)
            show()

        if share.functions.environment is single_turn and not share.sets:
            node.position.expect(share.origin.sampling.n, share.origin.sampling.max_tokens)
        show()  # the start of an engine is no part of the speed

        async def flush_regularly() -> None:
            while True:  # in a thread: on a slow filesystem an fsync takes seconds, and all requests go on
                await asyncio.sleep(share.settings.part_interval_s)
                await asyncio.to_thread(writer.flush)

        async def collect_all() -> Payload:
            await self._enter()
            try:
                short = await self._collector.run(source, on_group, node.watch.stop, len(kept))
            finally:
                if isinstance(source, Claimed):
                    node.flags.leave(source.claims)
                    iteration.waited_s[ROWS[share.kind].label] = source.waited_s
            node.position.reach(counted, source.needed, tokens)
            meter = self._collector.meter
            pace = Pace(meter.tokens, round(meter.busy_s, 3), meter.width)
            return {"short": short, "pace": pace} if meter.tokens else {"short": short}

        minding = [flush_regularly()]
        if makers.generates(node, share):
            minding.append(node.engine.mind(node.settings.engine, node.check, node.position.generate))
        async with _beside(collect_all(), *minding) as tasks:
            collecting = tasks[0]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if collecting not in done:
                for task in done:
                    task.result()  # raises: these never end by themselves
            return collecting.result()

    def _source(
        self, node: Node, iteration: Iteration, share: Share, kept: int, again: Sequence[int]
    ) -> Source:
        """Return what gives out the slots of a share, those of `again` first; `kept` are in flight."""
        plan, rank = share.plan, node.rank
        of = partial(slots_of, node.run_dir, iteration.number, share)
        if "chunks" not in plan:
            slots = of([*again, *plan["shares"][str(rank)]])
            return Listed(slots, len(again) + plan["needed"][str(rank)], kept)
        claims = Claims(node.run_dir, node.record.epoch, iteration.number, ROWS[share.kind], rank)
        _, most_s = node.settings.cluster.pause_bounds_s
        meter = self._collector.meter
        return Claimed(plan, claims, rank, kept, of(again), of, meter, most_s, node.position.step)
