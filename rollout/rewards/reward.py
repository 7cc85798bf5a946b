"""A loaded reward, or the sum of several: it gives the completions of a group numbers, and metrics."""

import asyncio
import contextlib
import hashlib
import inspect
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar, cast

import numpy as np

from rollout.loaded_code import code_of, sources
from rollout.origin import Code
from rollout.plugins import is_async, title_of
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.killable_rewards import LibraryReward, SyncReward
from rollout.rewards.code import CodeReward
from rollout.rewards.endpoint import EndpointError
from rollout.rewards.served import ServedReward
from rollout.settings import RolloutSettings
from rollout.stuck_user_code import outcome_of
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample, largest

T = TypeVar("T")
Score = float | dict[str, float]
"""A number, or a dict of numbers: `reward` and any metrics."""
Values = dict[str, float]
"""The `reward` of a sample, and metrics by their names."""
RewardFunction = Callable[[Task, str], Score | Awaitable[Score]]
"""What a user writes: (task, completion) -> score, sync or async; or as in `reward_signatures`."""
_DEFAULTS = RolloutSettings()


class RewardError(ValueError):
    """A completion could not be scored; the message names the reward and the task."""


class Reward:
    """A loaded reward, whatever runs it: `await reward.values(...)`. `code` says which it is."""

    def __init__(
        self,
        name: str,
        function: RewardFunction | LibraryReward | SyncReward | ServedReward,
        *,
        takes_lists: bool = False,
    ) -> None:
        """`function` is called in the event loop; with `takes_lists` once for all samples of a group."""
        self.name, self.title = name, title_of(name)
        self.code = code_of(name, function)
        if isinstance(function, (ServedReward, CodeReward)):
            digests = f"{code_of('', function).digest} {function.digest}"
            self.title = function.title
            self.code = Code(name, hashlib.sha256(digests.encode()).hexdigest()[:16])
        self._function, self._takes_lists = function, takes_lists
        self.is_instant = not is_async(function)
        """Whether nothing is waited for: the function runs in the event loop."""

    async def _call(self, task: Any, completion: Any, settings: RolloutSettings, samples: int) -> Any:
        """Call the function with a sample, or with lists of so many."""
        if isinstance(self._function, SyncReward):
            timeout_s, processes = settings.reward_timeout_s * samples, settings.reward_processes
            return await self._function(task, completion, timeout_s=timeout_s, processes=processes)
        result = self._function(task, completion)
        return await result if inspect.isawaitable(result) else result

    def sources(self) -> dict[str, tuple[str, str]]:
        """Return file and text of the modules behind it, by module."""
        return sources(self.name, self._function)

    async def close(self) -> None:
        """Close connections to servers; they are opened when they are needed."""
        if isinstance(self._function, ServedReward):
            await self._function.close()

    async def values(
        self, tasks: Sequence[Task], completions: Sequence[str], settings: RolloutSettings
    ) -> list[Values | RewardError]:
        """Return what each completion of a group has got, or why it has got nothing: the function raises,
        takes too long, ends its process, or returns something other than finite numbers. `tasks`: the
        group's, for each completion, with its own `reasoning`.
        """
        if not self._takes_lists:
            scoring = [self._value(*each, settings) for each in zip(tasks, completions, strict=True)]
            return await _all(scoring, in_turn=self.is_instant)
        where = f"reward {self.title!r}, task {tasks[0]['id']!r}"
        call = self._call([*tasks], [*completions], settings, len(tasks))
        results = await _result(call, where)
        if isinstance(results, RewardError):
            return [results] * len(tasks)
        return [_checked(result, where) for result in results]

    async def _value(self, task: Task, completion: str, settings: RolloutSettings) -> Values | RewardError:
        where = f"reward {self.title!r}, task {task['id']!r}"
        result = await _result(self._call(task, completion, settings, 1), where)
        return result if isinstance(result, RewardError) else _checked(result, where)


class SeveralRewards(Reward):
    """Several rewards, used as one."""

    def __init__(self, name: str, rewards: Mapping[str, Reward]) -> None:
        """`name`: the setting that names them all. `rewards`: each by what it is in that."""
        self.name = self.title = name
        self._rewards = [*rewards.values()]
        self.is_instant = all(reward.is_instant for reward in self._rewards)
        digests = "".join(f"{part} {reward.code.digest}\n" for part, reward in rewards.items())
        self.code = Code(name, hashlib.sha256(digests.encode()).hexdigest()[:16])

    def sources(self) -> dict[str, tuple[str, str]]:
        """Return file and text of the modules behind all of them, by module."""
        return {name: text for reward in self._rewards for name, text in reward.sources().items()}

    async def close(self) -> None:
        """Close the connections of all of them."""
        for reward in self._rewards:
            await reward.close()


class RewardsBySource(SeveralRewards):
    """Each group is scored by the reward of its task's source."""

    def __init__(self, name: str, field: str, general: Reward, by_source: Mapping[str, Reward]) -> None:
        """`field`: that of a task which names its source; sources without a reward have the `general` one."""
        super().__init__(name, {"": general, **by_source})
        self._field, self._general, self._by_source = field, general, by_source

    async def values(
        self, tasks: Sequence[Task], completions: Sequence[str], settings: RolloutSettings
    ) -> list[Values | RewardError]:
        """Return what the reward of the task's source gives."""
        reward = self._by_source.get(str(tasks[0].get(self._field)), self._general)
        return await reward.values(tasks, completions, settings)


class WeightedRewards(SeveralRewards):
    """What several rewards give is added up, each times its weight."""

    def __init__(self, name: str, parts: Sequence[tuple[Reward, float]]) -> None:
        """`name`: the setting that names them all."""
        super().__init__(name, {f"{reward.name}={weight!r}": reward for reward, weight in parts})
        self._parts = parts

    async def values(
        self, tasks: Sequence[Task], completions: Sequence[str], settings: RolloutSettings
    ) -> list[Values | RewardError]:
        """Return of each completion the sum as `reward`, what each part gave by the name of the part, and its
        metrics as NAME.METRIC; or the error, which names the part, if a part has one.
        """
        scoring = [reward.values(tasks, completions, settings) for reward, _ in self._parts]
        by_part = await _all(scoring, in_turn=self.is_instant)
        where = f"reward {self.title!r}, task {tasks[0]['id']!r}"
        return [self._sum(of_sample, where) for of_sample in zip(*by_part, strict=True)]

    def _sum(self, answers: Sequence[Values | RewardError], where: str) -> Values | RewardError:
        values_by_name: Values = {"reward": 0.0}
        for (reward, weight), values in zip(self._parts, answers, strict=True):
            if isinstance(values, RewardError):
                return values
            values_by_name["reward"] += weight * values["reward"]
            values_by_name |= {
                reward.title if name == "reward" else f"{reward.title}.{name}": value
                for name, value in values.items()
            }
        error = _checked(values_by_name["reward"], where)
        return error if isinstance(error, RewardError) else values_by_name


async def score(
    reward: Reward,
    task: Task,
    samples: Sequence[Sample],
    settings: RolloutSettings = _DEFAULTS,
    reasoning_end: str | None = None,
) -> list[RewardError]:
    """Set the rewards of a group's samples, and add the metrics to theirs. Returns why some have got none.

    With `reasoning_end` the completion is what follows it, which is nothing where it is missing. What
    precedes it is the field `reasoning` of the task. The metric `answered` says whether it was there.
    """
    if not samples:
        return []
    tasks, completions = [task] * len(samples), [sample.text for sample in samples]
    if reasoning_end is not None:
        for place, sample in enumerate(samples):
            reasoning, ended, answer = sample.text.rpartition(reasoning_end)
            tasks[place] = {**task, "reasoning": reasoning if ended else sample.text}
            completions[place] = answer.lstrip() if ended else ""
            sample.metrics["answered"] = float(bool(ended))
    failures: list[RewardError] = []
    answers = await reward.values(tasks, completions, settings)
    for sample, values in zip(samples, answers, strict=True):
        if isinstance(values, RewardError):
            failures.append(values)
        else:
            sample.reward = values.pop("reward")
            sample.metrics.update(values)
    return failures


async def _all(works: Sequence[Coroutine[Any, Any, T]], *, in_turn: bool) -> list[T]:
    """Return the values of what is scored, `in_turn` where a task for each would cost more than the rewards.
    What user code raises that is no Exception is raised when all have ended.
    """
    guarded = [*map(outcome_of, works)]
    outcomes = [await work for work in guarded] if in_turn else await asyncio.gather(*guarded)
    values: list[T] = []
    for each in outcomes:
        if isinstance(each, BaseException) and not isinstance(each, RewardError):
            raise each
        values.append(cast("T", each))
    return values


async def _result(call: Awaitable[Any], where: str) -> Any:
    """Return what the user's function returns, or an error that says why it does not."""
    try:
        return await call
    except (CallFailed, CallLost, EndpointError) as error:
        failure, cause = RewardError(f"{where}: {error}"), error
    except Exception as error:  # the user's function may raise anything
        failure, cause = RewardError(f"{where}: {type(error).__name__}: {error}"), error
    failure.__cause__ = cause
    return failure


def _checked(result: Any, where: str) -> Values | RewardError:
    values = cast("dict[str, Any]", result if isinstance(result, dict) else {"reward": result})
    if "reward" not in values:
        return RewardError(f"{where}: returned a dict without 'reward': {values!r}")
    try:
        return {str(name): _finite(value, name, where) for name, value in values.items()}
    except RewardError as error:
        return error


def _finite(value: Any, name: str, where: str) -> float:
    is_number = isinstance(value, (numbers.Real, Decimal, np.bool_)) or getattr(value, "ndim", None) == 0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if is_number and abs(number := float(value)) <= largest(name):
            return number
    expected = f"expected a finite number up to {largest(name):g}"
    raise RewardError(f"{where}: returned {name} = {value!r}, {expected}")
