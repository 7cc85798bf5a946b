"""Rewards: score a completion by a built-in function, a library, or the user's function."""

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import numpy as np

from rollout.plugins import PluginError, check_call, code_of, load_function
from rollout.processes.pool import CallFailed, CallLost
from rollout.processes.reward import LibraryReward, SyncReward
from rollout.rewards.math import math_reward
from rollout.rewards.regex import pattern_of, regex
from rollout.settings import RolloutSettings
from rollout.tasks.reasoning_gym import gym_reward
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample

Score = float | dict[str, float]
"""A number, or a dict of numbers: `reward` and any metrics."""
RewardFunction = Callable[[Task, str], Score | Awaitable[Score]]
"""What a user writes: (task, completion) -> score, sync or async."""

_DEFAULTS = RolloutSettings()

# Thousands separators, decimals, a small exponent; a minus that follows a digit or a letter is an operator.
_NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?|\d[\d,]*(?:\.\d+)?"
)


class RewardSettingError(ValueError):
    """The setting `reward` names no usable function."""


class RewardError(ValueError):
    """A completion could not be scored; the message names the reward and the task."""


class Reward:
    """A loaded reward: `await reward(task, completion)`, whatever runs it. `code` says which it is."""

    def __init__(self, name: str, function: RewardFunction | LibraryReward | SyncReward) -> None:
        """`function` is called in the event loop."""
        self.name = name
        self.code = code_of(name, function)
        self._function = function

    async def __call__(self, task: Task, completion: str, settings: RolloutSettings = _DEFAULTS) -> Score:
        if isinstance(self._function, SyncReward):
            timeout_s, processes = settings.reward_timeout_s, settings.reward_processes
            return await self._function(task, completion, timeout_s=timeout_s, processes=processes)
        result = self._function(task, completion)
        return await result if inspect.isawaitable(result) else result


def exact(task: Task, completion: str) -> float:
    """1 if the completion, stripped, is the answer."""
    return float(completion.strip() == _answer(task).strip())


def numeric(task: Task, completion: str) -> float:
    """1 if the completion's last number equals the answer's last number (`#### 1,200` equals 1200.0)."""
    wanted = _last_number(_answer(task))
    if wanted is None:
        raise ValueError(f"its answer {_answer(task)!r} holds no number")
    return float(_last_number(completion) == wanted)


def length(task: Task, completion: str) -> float:
    """1 - |length - target| / target, at least 0. Lengths are in characters; the target is the task's field
    `target_length`.
    """
    target = task.get("target_length")
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0:
        raise ValueError(f"its `target_length` must be a number of characters above 0, got {target!r}")
    return max(0.0, 1.0 - abs(len(completion) - target) / target)


BUILT_IN: dict[str, RewardFunction | SyncReward] = {
    "exact": exact,
    "numeric": numeric,
    "regex": SyncReward("rollout.rewards.regex:regex", regex),
    "length": length,
}
IN_PROCESSES: dict[str, LibraryReward] = {"math": math_reward, "reasoning_gym": gym_reward}
"""Rewards of optional libraries. Their processes start with the first completion and end with the node."""


def resolve_reward(name: str) -> Reward:
    """One of BUILT_IN or IN_PROCESSES, or `module:function`. Raises RewardSettingError."""
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name])
    if name in IN_PROCESSES:
        if reason := IN_PROCESSES[name].missing:
            raise RewardSettingError(f"reward {name!r}: {reason}")
        return Reward(name, IN_PROCESSES[name])
    if ":" not in name:
        there = ", ".join([*BUILT_IN, *IN_PROCESSES])
        raise RewardSettingError(f"reward {name!r}: there is {there}, or give module:function")
    try:
        function = load_function(name)
        check_call(function, ("task", "completion"))
    except PluginError as error:
        raise RewardSettingError(str(error)) from error
    return Reward(name, function if _is_async(function) else SyncReward(name, function))


def check_task(name: str, task: Task) -> None:
    """Raise ValueError if the built-in reward `name` cannot score any completion of the task; the text says
    what is wrong: "it has no `answer`".
    """
    function = BUILT_IN.get(name)
    if name in IN_PROCESSES:
        IN_PROCESSES[name].check(task)
    elif isinstance(function, SyncReward):  # regex
        pattern_of(task)
    elif function is not None:
        function(task, "")


def _is_async(function: Any) -> bool:
    """Return whether a function, or an object that is called like one, is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - it is looked at, not tested for
    )


async def score(reward: Reward, task: Task, sample: Sample, settings: RolloutSettings = _DEFAULTS) -> None:
    """Set the sample's reward, and add the metrics to the sample's. Raises RewardError if the function
    raises, takes too long, ends its process, or returns something other than finite numbers.
    """
    try:
        result = await reward(task, sample.text, settings)
    except (CallFailed, CallLost) as error:
        raise RewardError(f"{_where(reward, task)}: {error}") from error
    except Exception as error:  # the user's function may raise anything
        raise RewardError(f"{_where(reward, task)}: {type(error).__name__}: {error}") from error
    values = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in values:
        raise RewardError(f"{_where(reward, task)}: returned a dict without 'reward': {values!r}")
    checked = {str(name): _finite(value, name, reward, task) for name, value in values.items()}
    sample.reward = checked.pop("reward")
    sample.metrics.update(checked)


def _finite(value: Any, name: str, reward: Reward, task: Task) -> float:
    if not isinstance(value, (numbers.Real, np.bool_)) or not math.isfinite(value):
        raise RewardError(f"{_where(reward, task)}: returned {name} = {value!r}, expected a finite number")
    return float(value)


def _where(reward: Reward, task: Task) -> str:
    return f"reward {reward.name!r}, task {task['id']!r}"


def _answer(task: Task) -> str:
    if "answer" not in task:
        raise ValueError("it has no `answer`")
    return str(task["answer"])


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
