"""A loaded reward, or the sum of several: it gives a completion a number, and metrics."""

import asyncio
import contextlib
import hashlib
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

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
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample, largest

Score = float | dict[str, float]
"""A number, or a dict of numbers: `reward` and any metrics."""
RewardFunction = Callable[[Task, str], Score | Awaitable[Score]]
"""What a user writes: (task, completion) -> score, sync or async; or as in `reward_signatures`."""
_DEFAULTS = RolloutSettings()


class RewardError(ValueError):
    """A completion could not be scored; the message names the reward and the task."""


class Reward:
    """A loaded reward: `await reward(task, completion)`, whatever runs it. `code` says which it is."""

    def __init__(
        self, name: str, function: RewardFunction | LibraryReward | SyncReward | ServedReward
    ) -> None:
        """`function` is called in the event loop."""
        self.name, self.title = name, title_of(name)
        self.code = code_of(name, function)
        if isinstance(function, (ServedReward, CodeReward)):
            digests = f"{code_of('', function).digest} {function.digest}"
            self.title = function.title
            self.code = Code(name, hashlib.sha256(digests.encode()).hexdigest()[:16])
        self._function = function
        self.is_instant = not is_async(function)
        """Whether nothing is waited for: the function runs in the event loop."""

    async def __call__(self, task: Task, completion: str, settings: RolloutSettings = _DEFAULTS) -> Score:
        if isinstance(self._function, SyncReward):
            timeout_s, processes = settings.reward_timeout_s, settings.reward_processes
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

    async def values(self, task: Task, completion: str, settings: RolloutSettings) -> dict[str, float]:
        """Return the `reward` of a completion, and metrics by their names. Raises RewardError if the function
        raises, takes too long, ends its process, or returns something other than finite numbers.
        """
        where = f"reward {self.title!r}, task {task['id']!r}"
        try:
            result = await self(task, completion, settings)
        except (CallFailed, CallLost, EndpointError) as error:
            raise RewardError(f"{where}: {error}") from error
        except Exception as error:  # the user's function may raise anything
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        values = result if isinstance(result, dict) else {"reward": result}
        if "reward" not in values:
            raise RewardError(f"{where}: returned a dict without 'reward': {values!r}")
        return {str(name): _finite(value, name, where) for name, value in values.items()}


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

    async def __call__(self, task: Task, completion: str, settings: RolloutSettings = _DEFAULTS) -> Score:
        return await self.values(task, completion, settings)


class RewardsBySource(SeveralRewards):
    """Each completion is scored by the reward of its task's source."""

    def __init__(self, name: str, field: str, general: Reward, by_source: Mapping[str, Reward]) -> None:
        """`field`: that of a task which names its source; sources without a reward have the `general` one."""
        super().__init__(name, {"": general, **by_source})
        self._field, self._general, self._by_source = field, general, by_source

    async def values(self, task: Task, completion: str, settings: RolloutSettings) -> dict[str, float]:
        """Return and raise what the reward of the task's source does."""
        reward = self._by_source.get(str(task.get(self._field)), self._general)
        return await reward.values(task, completion, settings)


class WeightedRewards(SeveralRewards):
    """What several rewards give is added up, each times its weight."""

    def __init__(self, name: str, parts: Sequence[tuple[Reward, float]]) -> None:
        """`name`: the setting that names them all."""
        super().__init__(name, {f"{reward.name}={weight!r}": reward for reward, weight in parts})
        self._parts = parts

    async def values(self, task: Task, completion: str, settings: RolloutSettings) -> dict[str, float]:
        """Return the sum as `reward`, what each part gave by the name of the part, and its metrics as
        NAME.METRIC. Raises RewardError, which names the part, if a part does.
        """
        if self.is_instant:
            answers = [await reward.values(task, completion, settings) for reward, _ in self._parts]
        else:  # all end before one is raised: nothing of the sample goes on
            calls = [reward.values(task, completion, settings) for reward, _ in self._parts]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        values_by_name: dict[str, float] = {"reward": 0.0}
        for (reward, weight), values in zip(self._parts, answers, strict=True):
            if isinstance(values, BaseException):
                raise values
            values_by_name["reward"] += weight * values["reward"]
            values_by_name |= {
                reward.title if name == "reward" else f"{reward.title}.{name}": value
                for name, value in values.items()
            }
        _finite(values_by_name["reward"], "reward", f"reward {self.title!r}, task {task['id']!r}")
        return values_by_name


async def score(
    reward: Reward,
    task: Task,
    sample: Sample,
    settings: RolloutSettings = _DEFAULTS,
    reasoning_end: str | None = None,
) -> None:
    """Set the sample's reward, and add the metrics to the sample's. Raises RewardError as `Reward.values`.

    With `reasoning_end` the completion is what follows it, which is nothing where it is missing. What
    precedes it is the field `reasoning` of the task. The metric `answered` says whether it was there.
    """
    completion = sample.text
    if reasoning_end is not None:
        reasoning, ended, answer = completion.rpartition(reasoning_end)
        task = {**task, "reasoning": reasoning if ended else completion}
        completion = answer.lstrip() if ended else ""
        sample.metrics["answered"] = float(bool(ended))
    values = await reward.values(task, completion, settings)
    sample.reward = values.pop("reward")
    sample.metrics.update(values)


def _finite(value: Any, name: str, where: str) -> float:
    is_number = isinstance(value, (numbers.Real, Decimal, np.bool_)) or getattr(value, "ndim", None) == 0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if is_number and abs(number := float(value)) <= largest(name):
            return number
    expected = f"expected a finite number up to {largest(name):g}"
    raise RewardError(f"{where}: returned {name} = {value!r}, {expected}")
