"""The collector: makes the groups of slots, as many at once as the engine should see."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollout.blocking import end, interrupting
from rollout.engines.client import EngineClient, EngineError, RequestRefused, Sampling, finish_reason
from rollout.environments.environment import Environment, demonstrates
from rollout.environments.policy import Policy, turns_of
from rollout.environments.segments import Segment, advance
from rollout.rewards.builtin import Reward, RewardError, score
from rollout.settings import RolloutSettings
from rollout.tally import Tally
from rollout.tasks.task_set import Task
from rollout.trajectory import Group, Sample, Turn, unfit

log = logging.getLogger(__name__)

_STOP_POLL_S = 0.1  # a threading.Event cannot wake an event loop

ALL_FAILED_MIN = 4
"""If at least this many groups are given up and none is made, the reward or the environment is broken."""


class AllGivenUp(RuntimeError):
    """No group was made; the message says why the first one was given up."""


class UnfitSample(ValueError):
    """A sample of an environment can be neither trained nor stored; the message says why."""


class Stopped(Exception):
    """`stop` was set before all groups were made."""


@dataclass(frozen=True)
class Slot:
    """One group to make: the slot's number in the iteration, its task, its group seed, and the group as the
    iteration before has left it, if that has begun it.
    """

    number: int
    task: Task
    seed: int
    begun: Group | None = None

    def tombstone(self, reason: str) -> Group:
        """Return the group that says why the slot is given up for good."""
        return Group(self.number, self.task["id"], self.prompt, [], given_up=reason)

    @property
    def prompt(self) -> str:
        """For people: the task's prompt, or its messages, with their roles if there are several."""
        first, *more = self._opening
        if not more:
            return first.text
        return "\n\n".join(f"{turn.role}: {turn.text}" for turn in self._opening)

    @property
    def _opening(self) -> list[Turn]:
        return turns_of(self.task["prompt"] if "prompt" in self.task else self.task["messages"])

    def turns_after_prompt(self, sample: Sample, stop: Sequence[str]) -> list[Turn]:
        """Return what a sample says beyond the prompt; nothing if that is its text alone, which ends before
        the string of `stop` that ended it.
        """
        opening, turns = self._opening, sample.turns
        turns = turns[len(opening) :] if turns[: len(opening)] == opening else turns
        texts = [sample.text, *(sample.text + end for end in stop)]
        return [] if len(turns) == 1 and turns[0].text in texts else turns


async def collect(
    slots: Sequence[Slot],
    *,
    needed: int | None = None,
    counts: Callable[[Group], bool] = lambda group: True,
    client: EngineClient,
    environment: Environment,
    reward: Reward,
    sampling: Sampling,
    settings: RolloutSettings,
    segment: Segment | None = None,
    on_group: Callable[[Group], None],
    on_end: Callable[[], None] = lambda: None,
    stop: threading.Event,
    tally: Tally | None = None,
) -> int:
    """Make groups of `sampling.n` samples until `needed` of them count (default: one for each slot), or until
    no slot is left. `counts` says whether a group counts. Each group goes to `on_group` when it is finished,
    in any order. `on_end` is called at the end of each, also of one that is given up and handed over later.
    Returns how many of the needed groups were not made.

    These settings apply. `concurrency` bounds the samples in flight; a larger group runs alone. `over_sample`
    times the needed groups are begun. Once `completion_threshold` of the needed groups is finished, the
    others have `grace_period_s` left, and are then given up. A group is handed over as a tombstone if it
    takes longer than `group_timeout_s`, if its environment raises, or if the engine refuses its request. A
    sample that is unfit (rollout.trajectory.unfit) is left out of its group. So is one whose reward raises,
    or it ends the collection: see `on_reward_error`.

    With `segment` the samples are single turns that are advanced by it, and `environment` is not used. A
    group with a sample that is unfinished then is handed over without rewards.

    `sampling.seed` is not used. Raises EngineError when the engine fails, and Stopped within a second after
    `stop` is set; the rest is cancelled. An error of `on_group` ends the collection too. Raises AllGivenUp if
    there were several groups and all were given up: then no group was handed over.

    `tally` logs why samples and groups are lost; a process that keeps it shows each traceback once.
    """
    tally = tally or Tally(log)
    group_maker = _GroupMaker(client, environment, reward, sampling, settings, tally, segment)
    collection = _Collection(
        slots, len(slots) if needed is None else needed, counts, settings, on_group, on_end
    )
    limit = max(1, settings.concurrency // sampling.n)
    others = asyncio.all_tasks()
    workers = {
        asyncio.create_task(collection.work(group_maker))
        for _ in range(min(limit, len(slots), collection.begin))
    }
    pending = workers
    try:
        with interrupting(settings.group_timeout_s, "group_timeout_s") as say_free:
            while pending and not collection.is_over():
                say_free()
                if stop.is_set():
                    raise Stopped(f"stopped with {len(collection.in_flight)} groups in flight")
                done, pending = await asyncio.wait(
                    pending, timeout=_STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)  # the first error was raised
        await end(asyncio.all_tasks() - others, "tasks of environments")
        tally.say_counts()
    return collection.conclude()


class _Collection:
    """Which slots are begun and finished, and when to stop."""

    def __init__(
        self,
        slots: Sequence[Slot],
        needed: int,
        counts: Callable[[Group], bool],
        settings: RolloutSettings,
        on_group: Callable[[Group], None],
        on_end: Callable[[], None],
    ) -> None:
        self.in_flight: dict[int, Slot] = {}
        self.begin = math.ceil(needed * settings.over_sample)
        self._queue: Iterator[Slot] = iter(slots)  # shared: a worker that is done takes the next slot
        self._needed = needed
        self._counts = counts
        self._settings = settings
        self._on_group = on_group
        self._on_end = on_end
        self._finished = self._counted = self._given_up = self._failed = 0
        self._held: list[Group] = []
        self._grace_ends_s = math.inf

    async def work(self, maker: "_GroupMaker") -> None:
        """Make one group after another, until enough are begun."""
        while len(self.in_flight) + self._counted < self.begin and (slot := next(self._queue, None)):
            self.in_flight[slot.number] = slot
            group = await maker.make(slot)
            if self.is_over():
                return  # too late: the group is spare, or is given up with the others
            del self.in_flight[slot.number]
            self._take(group)

    def is_over(self) -> bool:
        """Return whether the groups that are still in flight are no longer needed."""
        return self._counted >= self._needed or time.monotonic() >= self._grace_ends_s

    def conclude(self) -> int:
        """Give up the groups that are in flight. Returns how many of the needed groups are missing."""
        short = self._needed - self._counted
        if self.in_flight and short > 0:
            reason = (
                f"cancelled: not finished {self._settings.grace_period_s:g} s after {self._counted} of "
                f"{self._needed} groups were (grace_period_s, completion_threshold)"
            )
            log.warning("%d groups are %s", len(self.in_flight), reason)
            for slot in self.in_flight.values():
                self._take(slot.tombstone(reason))
        if len(self._held) >= ALL_FAILED_MIN:
            first = self._held[0]
            raise AllGivenUp(
                f"all {len(self._held)} groups were given up, e.g. {first.task_id}: {first.given_up}"
            )
        for group in self._held:
            self._on_group(group)
        if self._given_up or self._failed:
            made = self._finished + self._given_up
            log.warning(
                "%d of %d groups were given up, %d samples were lost (unfit, or without a reward)",
                self._given_up,
                made,
                self._failed,
            )
        return max(0, self._needed - self._counted)

    def _take(self, group: Group) -> None:
        """Hand a group over. Tombstones are final: they wait for a group that shows that the reward works."""
        self._on_end()
        self._finished += group.given_up is None
        self._given_up += group.given_up is not None
        self._failed += len(group.failed)
        self._counted += self._counts(group)
        self._held.append(group)
        while self._finished and self._held:
            self._on_group(self._held.pop(0))
        settings = self._settings
        if self._grace_ends_s == math.inf and self._counted >= settings.completion_threshold * self._needed:
            self._grace_ends_s = time.monotonic() + settings.grace_period_s


@dataclass
class _GroupMaker:
    """Makes the group of a slot, also if the user's environment or reward fails."""

    client: EngineClient
    environment: Environment
    reward: Reward
    sampling: Sampling
    settings: RolloutSettings
    tally: Tally
    segment: Segment | None

    async def make(self, slot: Slot) -> Group:
        """Return the slot's group, or its tombstone; EngineError if the engine fails."""
        timeout_s = self.settings.group_timeout_s
        attempt = asyncio.create_task(self._attempt(slot))
        try:
            is_late = not (await asyncio.wait({attempt}, timeout=timeout_s))[0]
        finally:
            await end({attempt}, "groups")
        is_over = attempt.done() and not attempt.cancelled()
        made = attempt.result() if is_over else asyncio.CancelledError()
        if isinstance(made, Group):
            return made
        reason = _first_cause(made)
        if isinstance(reason, EngineError) and not isinstance(reason, RequestRefused):
            raise reason from None
        if isinstance(reason, RewardError) and self.settings.on_reward_error == "run":
            what = "a reward ends the run (rollout.on_reward_error=run)"
            self.tally.note("samples", what, reason, reason.__cause__)
            raise reason from None
        if is_late:
            reason = TimeoutError(f"took longer than group_timeout_s = {timeout_s:g}")
        what = f"slot {slot.number}, task {slot.task['id']!r} is given up"
        self.tally.note("groups", what, reason, None if isinstance(reason, EngineError) else reason)
        return slot.tombstone(f"{type(reason).__name__}: {reason}")

    async def _attempt(self, slot: Slot) -> Group | BaseException:
        """Return the group, or what the user's environment or reward has raised: anything, also the
        CancelledError of tasks of their own.
        """
        try:
            return await self._generate(slot)
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            return error

    async def _generate(self, slot: Slot) -> Group:
        policy = Policy(self.client, self.sampling, slot.seed)
        if self.segment is not None:
            made = await advance(slot.task, policy, self.sampling, slot.begun, self.segment)
        else:
            made = await self.environment(slot.task, policy, self.sampling)
        if not isinstance(made, list) or not made or not all(isinstance(one, Sample) for one in made):
            raise ValueError(
                f"the environment must return a non-empty list of Sample, got {type(made).__name__}"
            )
        for sample in made:
            sample.finish_reason = finish_reason(sample.finish_reason)
        demonstrated = demonstrates(self.environment)
        may_go_on = self.segment is not None
        faults = [unfit(sample, demonstrated=demonstrated, unfinished=may_go_on) for sample in made]
        samples = [sample for sample, fault in zip(made, faults, strict=True) if fault is None]
        for sample in samples:
            sample.turns = slot.turns_after_prompt(sample, self.sampling.stop)
        group = Group(slot.number, slot.task["id"], slot.prompt, samples)
        unscored = [sample for sample in samples if sample.reward is None and not group.is_unfinished]
        scored = await asyncio.gather(
            *(score(self.reward, slot.task, sample, self.settings) for sample in unscored),
            return_exceptions=True,
        )
        failures = [UnfitSample(fault) for fault in faults if fault is not None]
        failures += [error for error in scored if error is not None]
        for error in failures:
            if not isinstance(error, RewardError | UnfitSample):
                raise error
            if isinstance(error, RewardError) and self.settings.on_reward_error == "run":
                raise error
            self.tally.note("samples", f"slot {slot.number} loses a sample", error, error.__cause__)
        group.failed = [*(slot.begun.failed if slot.begun else ()), *map(str, failures)]
        if not group.is_unfinished:
            group.samples = [sample for sample in samples if sample.reward is not None]
            group.given_up = None if group.samples else f"no sample is left: {group.failed[0]}"
        return group


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error in the exception groups of asyncio.TaskGroup; an engine's failure comes before
    all others.
    """
    if isinstance(error, ExceptionGroup):
        return _first_cause((error.subgroup(EngineError) or error).exceptions[0])
    return error
