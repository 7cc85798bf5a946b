"""Make the groups of slots, as many at once as the engine should see."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from rollout.engine_places import Meter, Place
from rollout.engines.client import EngineClient
from rollout.environments.segments import Segment
from rollout.finished_groups import FinishedGroups
from rollout.group_maker import GroupMaker, Recipe, teachers_of
from rollout.rewards.teacher import Teacher
from rollout.settings import RolloutSettings
from rollout.slots import InFlight, ListedSlots, SlotSource
from rollout.stuck_user_code import end, interrupting
from rollout.tally import Tally, amount
from rollout.trajectory import Group

log = logging.getLogger(__name__)

_STOP_POLL_S = 0.1  # a threading.Event cannot wake an event loop

OURS = "flagpost"
"""The name of the tasks of an event loop that are no environment's, and go on when a collector ends."""

ALL_FAILED_MIN = 4
"""Groups that are given up, while none is made, from which on the reward or environment is broken."""

LATE = 2
"""With `over_sample`, once half of the needed groups are finished, one in flight for longer than this times
the slowest of them is not relied upon."""


class AllGivenUp(RuntimeError):
    """No group was made; the message says why the first one was given up."""


class Stopped(Exception):
    """`stop` was set before all groups were made."""


class GroupCollector:
    """Makes groups, each by the recipe of its slot's kind, as many at once as `concurrency` allows.

    A group is handed over as a tombstone if it takes longer than `group_timeout_s`, if its environment
    raises, or if the engine refuses its request. A sample that is unfit (rollout.trajectory.unfit) is left
    out of its group. No `seed` of a sampling is used.

    The settings that it follows, beside what a GroupMaker takes:

    - `concurrency`: the most samples that are generated at the same time; a larger group runs alone. null:
      as many as the engine can
    - `over_sample`: times the needed groups are begun, and a spare one for each group that is LATE
    - `completion_threshold`: once this part of the needed groups is finished (those that `made_elsewhere`
      counts are finished and needed too), the others have `grace_period_s` left, and are then given up
    - `on_reward_error`: whether a sample whose reward raises is left out, or ends the collection

    Its further parameters:

    - `counts`: whether a group counts as one of the needed groups
    - `segment`: the samples are single turns that it advances, and no environment is used; a group with a
      sample that is unfinished then is handed over without rewards
    - `may_all_fail`: tombstones alone are handed over too
    - `on_begin`: is given the slot of each group that is begun
    - `on_end`: is called at the end of each group, also of one that is given up and handed over later
    - `tally`: logs why samples and groups are lost; a process that keeps it shows each traceback once
    """

    def __init__(
        self,
        *,
        client: EngineClient,
        recipes: Mapping[str, Recipe],
        settings: RolloutSettings,
        counts: Callable[[Group], bool] = lambda group: True,
        segment: Segment | None = None,
        may_all_fail: bool = False,
        on_begin: Callable[[int], None] = lambda _slot: None,
        on_end: Callable[[], None] = lambda: None,
        tally: Tally | None = None,
    ) -> None:
        self._tally = tally or Tally(log)
        self._teachers = teachers_of(settings)
        self._makers = {
            kind: GroupMaker(client, recipe, settings, self._tally, segment, self._teachers)
            for kind, recipe in recipes.items()
        }
        self._settings = settings
        at_once = settings.concurrency or client.facts.samples
        most = max(recipe.sampling.n for recipe in recipes.values())
        self.meter = Meter(width=max(1, at_once // most))
        self._places = asyncio.Semaphore(self.meter.width)
        """Places of the engine: a group has one while it is generated, not while it waits for its rewards."""
        self._rewards = [recipe.reward for recipe in recipes.values()]
        is_instant = all(maker.is_instant for maker in self._makers.values())
        self._most_groups = self.meter.width * (1 if is_instant else 2)
        self._finished = FinishedGroups(counts)
        self._may_all_fail = may_all_fail
        self._on_begin = on_begin
        self._on_end = on_end
        self._source: SlotSource = ListedSlots([])
        self._on_group: Callable[[Group], None] = lambda _: None
        self._workers: set[asyncio.Task[None]] = set()
        self._in_flight: dict[int, InFlight] = {}
        """By slot: the groups that are being made."""
        self._longest_s = 0.0
        """How long the slowest of the finished groups took."""
        self._grace_ends_s = math.inf
        self.made_elsewhere: Callable[[], int] = lambda: 0
        """How many of the needed groups others have made: with them, a share none of whose groups ever ends
        comes to an end too."""
        self._holds = False
        """Whether finished groups are held, and nothing is over: see `begin`."""
        self._is_paused = False
        """Whether no further group is begun."""
        self._others: set[asyncio.Task[Any]] | None = None
        """The tasks that were there before any of an environment."""

    @property
    def open_slots(self) -> list[int]:
        """The slots whose groups are begun and not handed over."""
        return sorted([*self._in_flight, *(group.slot for group in self._finished.to_hand_over)])

    @property
    def is_busy(self) -> bool:
        """Whether any group is being made."""
        return bool(self._in_flight)

    async def run(
        self,
        source: SlotSource,
        on_group: Callable[[Group], None],
        stop: threading.Event,
        in_flight: int = 0,
    ) -> int:
        """Make groups of the slots of `source` until enough of them count, or until no slot is left. Each
        goes to `on_group` when it is finished, in any order. Returns how many needed groups were not made.

        Raises Stopped within a second after `stop` is set: groups in flight go on, and are held until `run`
        is called again; `in_flight`: how many of these `source` counts as needed. Raises EngineError
        when the engine fails. An error of `on_group` ends the collection too. Raises AllGivenUp if there
        were several groups and all were given up, unless that may be: then no group was handed over.
        """
        self._on_group = on_group
        self._start(source, in_flight)
        self._holds = False
        self._finished.hand_over(on_group)
        pending = set(self._workers)
        with interrupting(self._settings.group_timeout_s, "group_timeout_s") as say_free:
            while pending and not self._is_over():
                say_free()
                if stop.is_set():
                    self._pause()
                    raise Stopped(f"stopped with {len(self._in_flight)} groups in flight")
                pending = await _still_running(pending)
        return self._conclude()

    async def begin(self, source: SlotSource) -> NoReturn:
        """Make groups of the slots of `source`, all of them needed, and hold them, until this is cancelled:
        `run` goes on with what is in flight, and hands over what is finished. Raises as `run`.
        """
        self._start(source, 0)
        self._holds = True
        pending = set(self._workers)
        try:
            with interrupting(self._settings.group_timeout_s, "group_timeout_s") as say_free:
                while True:
                    say_free()
                    pending = await _still_running(pending)
        finally:
            self._pause()

    def _start(self, source: SlotSource, in_flight: int) -> None:
        """Have a worker for each group that may be in flight."""
        self._source = source
        self._finished.begin()
        self._grace_ends_s = math.inf
        self._is_paused = False
        if self._others is None:
            self._others = asyncio.all_tasks()
        self._workers = {worker for worker in self._workers if not worker.done()}
        at_once = min(self._most_groups, source.total + in_flight)
        more = max(0, at_once - len(self._workers))
        self._workers |= {asyncio.create_task(self._work()) for _ in range(more)}

    def _pause(self) -> None:
        """Begin no further group, and hold those that are finished from now on."""
        self._holds = self._is_paused = True
        busy = {flight.worker for flight in self._in_flight.values()}
        for worker in self._workers - busy:
            worker.cancel()
        self._workers &= busy

    def keep(self, slots: Collection[int]) -> None:
        """Give up what is in flight, or held, of other slots than these: nobody needs it any more. What has
        failed while nobody waited for it is forgotten too: its slot is begun again.
        """
        for slot, flight in list(self._in_flight.items()):
            if slot not in slots or flight.worker.done():
                del self._in_flight[slot]
                flight.worker.cancel()
                self._workers.discard(flight.worker)
                if flight.worker.done() and not flight.worker.cancelled():
                    flight.worker.exception()  # it has been seen
        for group in [group for group in self._finished.to_hand_over if group.slot not in slots]:
            self._finished.forget(group)

    async def end(self) -> None:
        """Cancel what is in flight, and whatever environments have left running."""
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)  # the first error was raised
        unfinished = {task for task in asyncio.all_tasks() if task.get_name() != OURS}
        own_tasks = {asyncio.current_task(), *(unfinished if self._others is None else self._others)}
        await end(unfinished - own_tasks, "tasks of environments")
        for reward in self._rewards:
            await reward.close()
        for teacher in self._teachers.values():
            if isinstance(teacher, Teacher):
                await teacher.close()
        self._tally.say_counts()

    async def _work(self) -> None:
        """Make one group after another, until no slot is left."""
        worker: Any = asyncio.current_task()
        while not self._is_paused:
            async with Place(self._places) as place:
                while (slot := await self._source.take(self._wants_spare)) is None:
                    if not self._may_replace():
                        return
                    await asyncio.sleep(_STOP_POLL_S)
                begun_s = asyncio.get_running_loop().time()
                self._in_flight[slot.number] = InFlight(slot, worker, begun_s)
                self._on_begin(slot.number)
                place.begin()
                group = await self._makers[slot.kind].make(slot, place.leave)
            if self._is_over() or slot.number not in self._in_flight:
                return  # too late: the group is spare, or is given up with the others
            del self._in_flight[slot.number]
            if group.given_up is None:
                took_s = asyncio.get_running_loop().time() - begun_s
                self._longest_s = max(took_s, self._longest_s)
            self.meter.add(group, place.busy_s)
            self._take(group)

    def _wants_spare(self) -> bool:
        """Return whether so few groups are made, or being made, that a spare slot is begun."""
        begin = math.ceil(self._source.needed * self._settings.over_sample)
        in_flight = len(self._in_flight)
        if self._may_replace() and 2 * self._finished.counted >= self._source.needed:
            since_s = asyncio.get_running_loop().time() - LATE * (self._longest_s or math.inf)
            in_flight = sum(flight.begun_s > since_s for flight in self._in_flight.values())
        return in_flight + self._finished.counted < begin

    def _may_replace(self) -> bool:
        """Return whether a spare slot may yet be begun for a group that is late."""
        is_short = self._finished.counted < self._source.needed
        return is_short and self._settings.over_sample > 1 and self._source.has_spare

    def _is_over(self) -> bool:
        """Return whether the groups that are still in flight are no longer needed."""
        if self._source.is_open or self._holds:
            return False
        if self._finished.counted >= self._source.needed:
            return True
        now_s = asyncio.get_running_loop().time()
        elsewhere = self.made_elsewhere()
        needed = self._source.needed + elsewhere
        is_enough = self._finished.counted + elsewhere >= self._settings.completion_threshold * needed
        if is_enough and self._grace_ends_s == math.inf:
            self._grace_ends_s = now_s + self._settings.grace_period_s
        return now_s >= self._grace_ends_s

    def _conclude(self) -> int:
        """Give up the groups that are in flight. Returns how many of the needed groups are missing."""
        self._tally.say_counts()
        needed, elsewhere = self._source.needed, self.made_elsewhere()
        short = needed - self._finished.counted
        if self._in_flight and short > 0:
            reason = (
                f"cancelled: not finished {self._settings.grace_period_s:g} s after "
                f"{self._finished.counted + elsewhere} of {needed + elsewhere} groups were (grace_period_s, "
                "completion_threshold)"
            )
            log.warning("%s %s", amount(len(self._in_flight), "groups", "are"), reason)
            for flight in self._in_flight.values():
                self._take(flight.slot.tombstone(reason))
        failed = self._finished.to_hand_over
        if len(failed) >= ALL_FAILED_MIN and not elsewhere and not self._may_all_fail:
            raise AllGivenUp(
                f"all {len(failed)} groups were given up, e.g. {failed[0].task_id}: {failed[0].given_up}"
            )
        self._finished.hand_over(self._on_group, may_all_fail=True)
        self._finished.say_losses()
        return max(0, needed - self._finished.counted)

    def _take(self, group: Group) -> None:
        """Hand a group over, or hold it."""
        self._on_end()
        self._source.end(group)
        self._finished.add(group)
        if not self._holds:
            self._finished.hand_over(self._on_group)


async def _still_running(workers: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait a moment, and return the workers that have not ended. Raises what one of them has raised."""
    if not workers:
        await asyncio.sleep(_STOP_POLL_S)
        return workers
    done, pending = await asyncio.wait(workers, timeout=_STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
    for worker in done:
        worker.result()
    return pending
