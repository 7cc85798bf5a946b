"""Make one group: generate its samples, then score them, whatever the user's environment or reward does."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import finish_reason
from rollout.environments.environment import Environment, demonstrates
from rollout.environments.policy import Policy
from rollout.environments.segments import Segment, advance
from rollout.environments.self_teacher import SelfTeacher, TaskTeacher
from rollout.origin import Sampling
from rollout.rewards.endpoint import EndpointError
from rollout.rewards.reward import Reward, RewardError, score
from rollout.rewards.teacher import Teacher
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.stuck_user_code import end, outcome_of
from rollout.tally import Tally, amount, warn_once
from rollout.tasks.task_set import TaskError
from rollout.trajectory import Group, Sample, unfit

T = TypeVar("T")
CHANCE = 1e-6
"""Samples of a group that are the same with less than this probability are copies."""


class UnfitSample(ValueError):
    """A sample of an environment can be neither trained nor stored; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """How the groups of some slots are made."""

    environment: Environment
    reward: Reward
    sampling: Sampling
    context: int | None = None
    vocabulary: int | None = None
    """How many positions and tokens the model has at most, where no engine looks at that."""


@dataclass
class GroupMaker:
    """Makes the group of a slot, also if the user's environment or reward fails."""

    client: EngineClient
    recipe: Recipe
    settings: RolloutSettings
    tally: Tally
    segment: Segment | None
    teachers: Mapping[str | None, Teacher | SelfTeacher] = field(default_factory=dict)
    """By the source of the task; None: of all other tasks. Empty: nobody is asked."""

    @property
    def is_instant(self) -> bool:
        """Whether a group waits for nothing once it is generated."""
        return self.recipe.reward.is_instant and not self.teachers

    async def make(self, slot: Slot, generated: Callable[[], None]) -> Group:
        """Return the slot's group, or its tombstone; EngineError if the engine fails.

        `generated` is called when the engine has nothing more to do for the group. Then the group is scored.
        Each of the two may take `group_timeout_s`.
        """
        outcome = await self._attempt(self._generate(slot))
        generated()
        if isinstance(outcome, list):
            scoring = self._score(slot, outcome)
            outcome = await (outcome_of(scoring) if self.is_instant else self._attempt(scoring))
        if isinstance(outcome, Group):
            return outcome
        reason = _first_cause(outcome)
        if isinstance(reason, EngineError) and not isinstance(reason, RequestRefused):
            raise reason from None
        if isinstance(reason, RewardError) and self.settings.on_reward_error == "run":
            loss = "a reward ends the run (rollout.on_reward_error=run)"
            self.tally.note("samples", loss, reason, reason.__cause__)
            raise reason from None
        loss = f"the group of task {slot.task_id!r} is given up"
        self.tally.note("groups", loss, reason, None if isinstance(reason, EngineError) else reason)
        return slot.tombstone(f"{type(reason).__name__}: {reason}")

    async def _attempt(self, work: Coroutine[Any, Any, T]) -> T | BaseException:
        """Return the outcome of user code, as `outcome_of`; a TimeoutError after `group_timeout_s`."""
        timeout_s = self.settings.group_timeout_s
        attempt = asyncio.create_task(outcome_of(work))
        try:
            is_late = not (await asyncio.wait({attempt}, timeout=timeout_s))[0]
        finally:
            if not attempt.done():
                await end({attempt}, "groups")
        outcome = attempt.result() if attempt.done() and not attempt.cancelled() else asyncio.CancelledError()
        is_failed = isinstance(outcome, BaseException)
        if is_late and is_failed and not isinstance(_first_cause(outcome), EngineError | RewardError):
            return TimeoutError(f"took longer than group_timeout_s = {timeout_s:g}")
        return outcome

    async def _generate(self, slot: Slot) -> list[Sample]:
        policy = Policy(self.client, self.recipe.sampling, slot.seed)
        if self.segment is not None:
            samples = await advance(slot.task, policy, self.recipe.sampling, slot.begun, self.segment)
        else:
            samples = await self.recipe.environment(slot.task, policy, self.recipe.sampling)
        if not isinstance(samples, list) or not samples:
            got = "an empty list" if samples == [] else type(samples).__name__
            raise ValueError(f"the environment must return a non-empty list of Sample, got {got}")
        if not_samples := [sample for sample in samples if not isinstance(sample, Sample)]:
            is_coroutine = asyncio.iscoroutine(not_samples[0])
            advice = "`await` it" if is_coroutine else f"{not_samples[0]!r:.60}; episode.sample() makes one"
            raise ValueError(
                "the environment must return a list of Sample, got a list with "
                f"{type(not_samples[0]).__name__}: {advice}"
            )
        n = self.recipe.sampling.n
        if len(samples) < n and self.segment is None and not demonstrates(self.recipe.environment):
            name = getattr(self.recipe.environment, "__name__", type(self.recipe.environment).__name__)
            teaches = "a group of one teaches nothing" if len(samples) == 1 else "the rest is missing"
            warn_once(
                f"few samples {len(samples)}",
                f"environment {name} returned {amount(len(samples), 'samples')} of the {n} of sampling.n, "
                f"e.g. of task {slot.task_id!r}: {teaches}; play sampling.n episodes",
            )
        return samples

    async def _score(self, slot: Slot, generated: list[Sample]) -> Group:
        """Return the group of the samples that are fit and that have got a reward."""
        for sample in generated:
            sample.finish_reason = finish_reason(sample.finish_reason)
        look = partial(
            unfit,
            demonstrated=demonstrates(self.recipe.environment),
            unfinished=self.segment is not None,
            context=self.recipe.context,
            vocabulary=self.recipe.vocabulary,
        )
        faults = [look(sample) for sample in generated]
        samples = [sample for sample, fault in zip(generated, faults, strict=True) if fault is None]
        is_given = demonstrates(self.recipe.environment) or not self.recipe.sampling.temperature
        if not is_given and _are_copies(samples):
            warn_once(
                "copies",
                f"all {len(samples)} samples of task {slot.task_id!r} are the same, which chance does not "
                "do: a group of copies teaches nothing; play sample j with policy.episode(j), each with "
                "another j",
            )
        slot.leave_prompt_out(samples, self.recipe.sampling.stop)
        group = Group(slot.number, slot.task_id, slot.prompt, samples)
        failures: list[Exception] = [UnfitSample(fault) for fault in faults if fault is not None]
        if not group.is_unfinished:
            reward, end = self.recipe.reward, self.recipe.sampling.reasoning_end
            unscored = [sample for sample in samples if sample.reward is None]
            failures += await score(reward, slot.task, unscored, self.settings, end)
            failures += await self._taught(slot, [sample for sample in samples if sample.reward is not None])
        for error in failures:
            if isinstance(error, RewardError) and self.settings.on_reward_error == "run":
                raise error
            self.tally.note("samples", f"task {slot.task_id!r} loses a sample", error, error.__cause__)
        group.failed = [*(slot.begun.failed if slot.begun else ()), *map(str, failures)]
        if not group.is_unfinished:
            group.samples = [sample for sample in samples if sample.reward is not None]
            group.given_up = None if group.samples else f"no sample is left: {group.failed[0]}"
        return group

    async def _taught(self, slot: Slot, samples: list[Sample]) -> list[RewardError]:
        """Ask the teacher for its logprobs of the samples, if there is one. Returns why some have got none:
        these lose their rewards, and so their places in the group.
        """
        if not self.teachers:
            return []
        source = str(slot.task.get(self.settings.ratio_field))
        teacher = self.teachers.get(source) or self.teachers[None]
        if isinstance(teacher, SelfTeacher):
            teacher = teacher.of_task(slot.task, Policy(self.client, self.recipe.sampling, slot.seed))
        outcomes = await asyncio.gather(*(outcome_of(_asked(teacher, sample)) for sample in samples))
        failures: list[RewardError] = []
        for sample, outcome in zip(samples, outcomes, strict=True):
            if isinstance(outcome, EndpointError | RequestRefused | TaskError):
                sample.reward = None
                text = str(outcome).removeprefix(f"task {slot.task['id']!r}: ")
                failures.append(RewardError(f"teacher, task {slot.task['id']!r}: {text}"))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                sample.teacher_logprobs = outcome
        return failures


def _are_copies(samples: Sequence[Sample]) -> bool:
    """Return whether the same tokens were sampled again and again, although others were likely."""
    if len(samples) < 2:
        return False
    first = samples[0]
    if any(not np.array_equal(first.token_ids, each.token_ids) for each in samples[1:]):
        return False
    return float(np.nansum(first.logprobs)) * (len(samples) - 1) < math.log(CHANCE)


async def _asked(teacher: Teacher | TaskTeacher, sample: Sample) -> NDArray[np.float32]:
    """Return the teacher's logprobs of a sample. Raises TaskError for one with pictures."""
    if sample.pictures:
        raise TaskError("it is shown no pictures, and its environment shows some; leave rollout.teacher out")
    return await teacher.logprobs(sample)


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error in the exception groups of asyncio.TaskGroup; an engine's failure comes before
    all others.
    """
    if isinstance(error, BaseExceptionGroup):
        return _first_cause((error.subgroup(EngineError) or error).exceptions[0])
    return error


def teachers_of(settings: RolloutSettings) -> dict[str | None, Teacher | SelfTeacher]:
    """Return the teachers by the source of the tasks that they are for; None: of all other tasks."""
    teachers: dict[str | None, Teacher | SelfTeacher] = {
        source: Teacher(name) for source, name in settings.teachers.items()
    }
    if settings.teacher is not None:
        teachers[None] = SelfTeacher.from_settings(settings) or Teacher(settings.teacher)
    return teachers
