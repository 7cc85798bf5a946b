"""Rows 2 and 6 of one node: generate its share, and make the groups durable as they finish.

What is in flight when an epoch ends goes on in the next one, if that makes the same groups: the event loop of
the collection is not run meanwhile, and the node says in `enter` which slots it keeps.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coordinator.directory import parts
from coordinator.directory.claims import Claims
from coordinator.directory.layout import Kind
from coordinator.directory.published import Incomplete
from coordinator.node.flags import Payload
from coordinator.node.functions import Functions
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.chunks import Pace
from coordinator.protocol.phases import Phase
from coordinator.rows import prefixes
from coordinator.rows.claimed import Claimed
from coordinator.rows.eval_sets import SetSlots
from coordinator.rows.prefixes import Begun
from coordinator.rows.serving import serve
from rollout.collect import Collector, Stopped
from rollout.engines.client import EngineClient
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.environments.demonstration import end_of_sequence
from rollout.environments.environment import BUILT_IN, Environment, demonstrates, single_turn
from rollout.environments.segments import Segment
from rollout.group_maker import Recipe
from rollout.origin import Origin
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.slots import Listed, Slot, Source
from rollout.tally import Tally
from rollout.tasks.task_set import TaskSet, group_seed
from rollout.trajectory import Group, generated_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
OVER_S = 0.02
"""How often a node that generates ahead looks whether the checkpoint is there."""
ROWS: dict[Kind, Phase] = {"train": Phase.TRAIN_ROLLOUT, "eval": Phase.EVAL_ROLLOUT}
_tally = Tally(log)  # of the process: each traceback is shown once, not in each iteration


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
    begun: Sequence[Begun] = ()
    """What the first slots go on with."""
    sets: Sequence[NamedSet] = ()
    """The named sets, by slot."""
    segment: Segment | None = None
    """What the iteration adds to a sample, if that may be less than all of it."""

    def kept(self, rank: int) -> list[int]:
        """Return the slots that a rank has in flight from the epoch before."""
        return self.plan["kept"].get(str(rank), [])

    def is_empty(self, rank: int) -> bool:
        """Return whether a rank has nothing to make."""
        more = self.plan["chunks"] if "chunks" in self.plan else self.plan["needed"][str(rank)]
        return not more and not self.kept(rank)


def key_of(node: Node, iteration: Iteration, kind: Kind) -> str:
    """Return a digest of all that decides how a row makes its groups: in two epochs with the same key, a
    group that was begun in the one can be finished in the other.
    """
    header, settings = iteration.header, node.settings
    about = [kind, iteration.number, header["policy"], header["opened"], header["code"]]
    about += [part.model_dump(mode="json") for part in (settings.rollout, settings.eval)]
    about += [settings.engine.model_dump(mode="json", exclude={"url"})]  # each node may have its own
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def drop_outdated(node: Node, iteration: Iteration) -> None:
    """Give up what is in flight from the epoch before, if no row of this iteration goes on with it."""
    if node.in_flight is None:
        return
    keys = {key_of(node, iteration, kind) for kind, row in ROWS.items() if iteration.has(row, node.settings)}
    is_ahead = node.in_flight.iteration > iteration.number and iteration.resume_at >= Phase.CHECKPOINT
    if node.in_flight.key not in keys and not is_ahead:
        node.drop_in_flight()


def collect_share(node: Node, iteration: Iteration, share: Share) -> Payload:
    """Generate a share, and make its groups durable as they finish; says how many are short, and what the
    node's pace was.
    """
    node.position.reach(0, 0)
    kept = share.kept(node.rank)
    if not kept:
        node.drop_in_flight()
    if share.is_empty(node.rank):
        return {"short": 0}
    policy = node.policies.of(iteration.header["policy_iteration"])
    if policy.digest != iteration.header["policy"]:
        raise Incomplete(
            f"{policy.directory} holds policy {policy.digest} here, but {iteration.header['policy']} on the "
            "master; give all nodes the same model"
        )
    if _generates(node, share):
        serve(node, policy)
    place = (share.kind, iteration.number, node.rank, node.record.epoch, share.origin)
    verify = node.engine.check_serves
    writer = parts.PartWriter(node.run_dir, *place, verify)
    collection = node.in_flight
    if not isinstance(collection, Ongoing):
        collection = node.in_flight = _ongoing(node, iteration, share)
    iteration.ahead_s += collection.ahead_s
    collection.ahead_s = 0.0
    is_paused = False
    try:
        with node.unresponsive.guarding(node.children, lambda: writer.is_writing):
            return collection.run(node, iteration, share, writer)
    except Stopped:
        is_paused = True
        node.check()
        raise
    finally:
        if not is_paused:
            node.drop_in_flight()
        node.persist(writer.flush)


def begin_share(node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]) -> None:
    """Begin a share of an iteration that is not open yet, until `is_over`: what is in flight then is
    `node.in_flight`, and nothing was published. `is_over` is asked again and again, and may raise.

    Where the share cannot be made nothing is in flight: the row itself will say why.
    """
    node.drop_in_flight()
    collection = node.in_flight = _ongoing(node, iteration, share)
    with node.unresponsive.guarding(node.children, lambda: False):
        error = collection.begin(node, iteration, share, is_over)
    if error is not None:
        log.info("nothing is generated ahead any more: %s", error)
        node.drop_in_flight()


def _ongoing(node: Node, iteration: Iteration, share: Share) -> "Ongoing":
    return Ongoing(node, share, key_of(node, iteration, share.kind), iteration.number)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while nobody runs it: nothing times out meanwhile."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() - self.skipped_s


class Ongoing:
    """The groups that a node has in flight, and the event loop that makes them."""

    def __init__(self, node: Node, share: Share, key: str, iteration: int = 0) -> None:
        self.key = key
        self.iteration = iteration
        self.ahead_s = 0.0
        """For how long groups were made before their row."""
        self._client = _client(node, share)
        self._entered = AsyncExitStack()
        self._runner = asyncio.Runner(loop_factory=_Loop)
        self._left_s: float | None = None
        self._is_open = False
        self._collector = Collector(
            counts=share.quota.counts,
            client=self._client,
            environment=_environment(node, share.kind, share.functions),
            reward=share.functions.reward,
            sampling=share.origin.sampling,
            settings=share.settings,
            segment=share.segment,
            others={
                one.slots.name: Recipe(
                    _environment(node, share.kind, one.functions), one.functions.reward, one.slots.sampling
                )
                for one in share.sets
            },
            on_end=node.position.step,
            tally=_tally,
        )

    @property
    def slots(self) -> list[int]:
        """The slots whose groups are begun and not handed over."""
        return self._collector.open_slots

    def run(self, node: Node, iteration: Iteration, share: Share, writer: parts.PartWriter) -> Payload:
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

    async def _begin(
        self, node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]
    ) -> BaseException | None:
        slots = _slots(node, iteration.number, share, share.plan["shares"][str(node.rank)])
        began_s = time.monotonic()

        async def wait_until_over() -> None:
            while not is_over():
                await asyncio.sleep(OVER_S)
                if self._collector.is_busy:
                    self.ahead_s = time.monotonic() - began_s

        async def make() -> None:
            await self._enter()
            await self._collector.begin(Listed(slots))

        over = asyncio.create_task(wait_until_over())
        making = [asyncio.create_task(make())]
        making += [asyncio.create_task(node.engine.mind(node.settings.engine, node.check))]
        failed: BaseException | None = None
        try:
            done, _ = await asyncio.wait([over, *making], return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in done if task is not over), None)
            await over  # raises what ends the row
        finally:
            for task in (over, *making):
                task.cancel()
            await asyncio.gather(over, *making, return_exceptions=True)
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

    async def _collect(
        self, node: Node, iteration: Iteration, share: Share, writer: parts.PartWriter
    ) -> Payload:
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

    def _source(
        self, node: Node, iteration: Iteration, share: Share, kept: int, again: Sequence[int]
    ) -> Source:
        """Return what gives out the slots of a share, those of `again` first; `kept` are in flight."""
        plan, rank = share.plan, node.rank
        slots_of = partial(_slots, node, iteration.number, share)
        if "chunks" not in plan:
            slots = slots_of([*again, *plan["shares"][str(rank)]])
            return Listed(slots, len(again) + plan["needed"][str(rank)], kept)
        claims = Claims(node.run_dir, node.record.epoch, iteration.number, ROWS[share.kind], rank)
        _, most_s = node.settings.cluster.pause_bounds_s
        meter = self._collector.meter
        return Claimed(plan, claims, rank, kept, slots_of(again), slots_of, meter, most_s, node.position.step)


def _slots(node: Node, iteration: int, share: Share, numbers: Sequence[int]) -> list[Slot]:
    """Return slots of a share, each with its task, its seed, and what the iteration before has made."""
    groups = prefixes.read(node.run_dir, iteration, share.begun, numbers)
    slots: list[Slot] = []
    for slot in numbers:
        first = (iteration, slot - len(share.begun))  # as if nothing had been begun before
        if slot < len(share.begun):
            first = (share.begun[slot].iteration, share.begun[slot].slot)
        seed = group_seed(share.settings.seed, share.kind, *first)
        if one := next((one for one in share.sets if one.slots.begin <= slot < one.slots.end), None):
            slots.append(_of_set(one, share.settings.seed, iteration, slot))
        else:
            slots.append(Slot(slot, share.tasks.tasks[share.order[slot]], seed, groups.get(slot)))
    return slots


def _of_set(one: NamedSet, run_seed: int, iteration: int, slot: int) -> Slot:
    """Return a slot of a named set. Its seed does not depend on which other sets there are."""
    name, index = one.slots.name, slot - one.slots.begin
    seed = group_seed(run_seed, f"eval/{name}", iteration, index)
    return Slot(slot, one.tasks.tasks[index], seed, kind=name)


def _generates(node: Node, share: Share) -> bool:
    """Return whether the share's samples come from the engine."""
    return not demonstrates(_environment(node, share.kind, share.functions))


def _client(node: Node, share: Share) -> EngineClient:
    """Return what the share's environment asks: the engine, or a tokenizer where nothing is generated."""
    if not _generates(node, share):
        return LocalTokenizer(_start_model(node))
    engine = node.settings.engine
    is_corrected = node.settings.trainer.engine_correction != "off"
    return EngineClient(
        node.engine.url,
        model=node.engine.model,
        request_timeout_s=engine.request_timeout_s,
        retry_s=node.engine.restart_patience_s(engine),
        facts=replace(node.engine.facts, may_force=is_corrected or share.kind == "eval"),
    )


def _environment(node: Node, kind: Kind, functions: Functions) -> Environment:
    """Return what makes the groups of a share.

    Demonstrations end as the model's sequences do. They cannot evaluate a policy: there it answers itself.
    """
    environment = functions.environment
    if not demonstrates(environment):
        return environment
    if kind == "eval":
        return single_turn
    if environment not in BUILT_IN.values():
        return environment
    ends = end_of_sequence(_start_model(node))
    return partial(environment, end_ids=ends)  # pyright: ignore[reportCallIssue]  (the built-in ones take it)


def _start_model(node: Node) -> Path:
    """Return a directory of this machine with the model that the run started from."""
    return node.policies.hold(node.policies.of(0), node.reading()).directory
