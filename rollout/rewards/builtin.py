"""Rewards: score a completion by a built-in function, a library, or the user's function."""

import asyncio
import contextlib
import inspect
import math
import numbers
import re
import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

from rollout.plugins import PluginError, code_of, load_function
from rollout.processes.reward import ProcessReward
from rollout.rewards.math import math_reward
from rollout.tasks.reasoning_gym import gym_reward
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample

Score = float | dict[str, float]
"""A number, or a dict of numbers: `reward` and any metrics."""
RewardFunction = Callable[[Task, str], Score | Awaitable[Score]]
"""What a user writes: (task, completion) -> score, sync or async."""

# Thousands separators, decimals, a small exponent; a minus that follows a digit or a letter is an operator.
_NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?|\d[\d,]*(?:\.\d+)?"
)


class RewardSettingError(ValueError):
    """The setting `reward` names no usable function."""


class RewardError(ValueError):
    """A completion could not be scored; the message names the reward and the task."""


class Reward:
    """A loaded reward: `await reward(task, completion)`, also of a sync function. `code` says which it is."""

    def __init__(self, name: str, function: RewardFunction, *, inline: bool) -> None:
        self.name = name
        self.code = code_of(name, function)
        self._function = function
        self._inline = inline

    async def __call__(self, task: Task, completion: str) -> Score:
        if self._inline:
            result = self._function(task, completion)
        else:
            result = await _in_thread(self._function, task, completion)
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


def regex(task: Task, completion: str) -> float:
    """1 if the pattern is found anywhere in the completion (to match all of it, anchor it with \\A and \\Z).
    The pattern is the task's field `pattern`, or its answer if there is none.
    """
    pattern = task.get("pattern", task.get("answer"))
    if not isinstance(pattern, str):
        raise ValueError("it has neither a `pattern` nor an `answer` that is a string")
    try:
        return float(re.search(pattern, completion) is not None)
    except re.error as error:
        raise ValueError(f"its pattern {pattern!r} is no regular expression: {error}") from error


def length(task: Task, completion: str) -> float:
    """1 - |length - target| / target, at least 0. Lengths are in characters; the target is the task's field
    `target_length`.
    """
    target = task.get("target_length")
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not target > 0:
        raise ValueError(f"its `target_length` must be a number of characters above 0, got {target!r}")
    return max(0.0, 1.0 - abs(len(completion) - target) / target)


BUILT_IN: dict[str, RewardFunction] = {"exact": exact, "numeric": numeric, "regex": regex, "length": length}
IN_PROCESSES: dict[str, ProcessReward] = {"math": math_reward, "reasoning_gym": gym_reward}
"""Rewards of optional libraries. Their processes start with the first completion and end with the node."""


def resolve_reward(name: str) -> Reward:
    """One of BUILT_IN or IN_PROCESSES, or `module:function`. Raises RewardSettingError."""
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name], inline=True)
    if name in IN_PROCESSES:
        if reason := IN_PROCESSES[name].missing:
            raise RewardSettingError(f"reward {name!r}: {reason}")
        return Reward(name, IN_PROCESSES[name], inline=False)
    if ":" not in name:
        there = ", ".join([*BUILT_IN, *IN_PROCESSES])
        raise RewardSettingError(f"reward {name!r}: there is {there}, or give module:function")
    try:
        function = load_function(name)
    except PluginError as error:
        raise RewardSettingError(f"reward: {error}") from error
    return Reward(name, function, inline=inspect.iscoroutinefunction(function))


async def score(reward: Reward, task: Task, sample: Sample) -> None:
    """Set the sample's reward, and add the metrics to the sample's. Raises RewardError if the function
    raises, or returns something other than finite numbers.
    """
    try:
        result = await reward(task, sample.text)
    except Exception as error:  # the user's function may raise anything
        raise RewardError(f"{_where(reward, task)}: {type(error).__name__}: {error}") from error
    values = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in values:
        raise RewardError(f"{_where(reward, task)}: returned a dict without 'reward': {values!r}")
    checked = {str(name): _finite(value, name, reward, task) for name, value in values.items()}
    sample.reward = checked.pop("reward")
    sample.metrics.update(checked)


def _finite(value: Any, name: str, reward: Reward, task: Task) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
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


async def _in_thread(function: RewardFunction, task: Task, completion: str) -> Any:
    """Run a sync function beside the event loop, in a daemon thread. Loop and process wait at their end for
    the threads of asyncio.to_thread, so a reward that hangs would keep a stopped node alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, failure: BaseException | None) -> None:
        if not future.done():  # else the sample was given up meanwhile
            future.set_result((result, failure))

    def work() -> None:
        result, failure = None, None
        try:
            result = function(task, completion)
        except BaseException as error:  # the user's function may raise anything; it is raised again below
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="reward", daemon=True).start()
    result, failure = await future
    if isinstance(failure, Exception):
        raise failure
    if failure is not None:
        raise RuntimeError(f"it raised {failure!r}")
    return result
