"""Rewards: score a completion by a built-in function, a library, the user's function, or several of them."""

import asyncio
import contextlib
import difflib
import functools
import hashlib
import inspect
import numbers
import re
import unicodedata
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from rollout.origin import Code
from rollout.plugins import (
    SUFFIX,
    PluginError,
    check_call,
    code_of,
    is_async,
    load_function,
    sources,
    title_of,
)
from rollout.processes.killable_rewards import LibraryReward, SyncReward
from rollout.processes.pool import CallFailed, CallLost
from rollout.processes.reward_signatures import lacking, refuse_unfit, with_our_parameters
from rollout.rewards.code import NAME as CODE
from rollout.rewards.code import CodeReward, is_code
from rollout.rewards.endpoint import EndpointError
from rollout.rewards.math import math_reward
from rollout.rewards.numbers import last_number, single_number, with_decimal_commas
from rollout.rewards.parts import Part, parts_of
from rollout.rewards.regex import pattern_of, regex
from rollout.rewards.served import SERVED, ServedReward
from rollout.rewards.solutions import refuse_solution
from rollout.settings import RolloutSettings
from rollout.tasks.fields import name_of_answer, whole_number
from rollout.tasks.reasoning_gym import gym_reward
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample, largest

Score = float | dict[str, float]
"""A number, or a dict of numbers: `reward` and any metrics."""
RewardFunction = Callable[[Task, str], Score | Awaitable[Score]]
"""What a user writes: (task, completion) -> score, sync or async; or as in `reward_signatures`."""

_DEFAULTS = RolloutSettings()


class RewardSettingError(ValueError):
    """The setting `reward` names no usable function."""


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
            behind = f"{code_of('', function).digest} {function.digest}"
            self.title = function.title
            self.code = Code(name, hashlib.sha256(behind.encode()).hexdigest()[:16])
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


class WeightedRewards(Reward):
    """Several rewards, used as one: what they give is added up, each times its weight."""

    def __init__(self, name: str, parts: Sequence[tuple[Reward, float]]) -> None:
        """`name`: the setting that names them all."""
        self.name = self.title = name
        self._parts = parts
        self.is_instant = all(reward.is_instant for reward, _ in parts)
        behind = "".join(f"{reward.name}={weight!r} {reward.code.digest}\n" for reward, weight in parts)
        self.code = Code(name, hashlib.sha256(behind.encode()).hexdigest()[:16])

    def sources(self) -> dict[str, tuple[str, str]]:
        """Return file and text of the modules behind all parts, by module."""
        return {name: text for reward, _ in self._parts for name, text in reward.sources().items()}

    async def close(self) -> None:
        """Close the connections of all parts."""
        for reward, _ in self._parts:
            await reward.close()

    async def __call__(self, task: Task, completion: str, settings: RolloutSettings = _DEFAULTS) -> Score:
        return await self.values(task, completion, settings)

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


def exact(task: Task, completion: str) -> float:
    """1 if the completion, stripped, is the answer. A whole number is one also where a table has made 85.0
    of it.
    """
    answer, text = _plain(answer_text(task)), _plain(completion)
    if not answer:
        raise ValueError("its `answer` is empty")
    refuse_solution(answer)
    whole = re.sub(r"^([-+]?[0-9]+)\.0$", r"\1", answer)
    return float(text in (answer, whole))


def _plain(text: str) -> str:
    """Return a text without outer spaces, in the one form that Unicode has for what looks the same."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n")).strip()


def numeric(task: Task, completion: str) -> float:
    """1 if the completion's last number equals the answer, which is a single number (`#### 1,200` equals
    1200.0). Both are read as `rollout.rewards.numbers` says; `2,5` at the end is 5, and 2.5 too.
    """
    answer = answer_text(task)
    target = single_number(answer)
    if target is None and not re.search("[0-9]", answer):
        raise ValueError(f"its answer {answer!r} holds no number")
    if target is None:
        raise ValueError(
            f"its answer {answer!r} is no single number: write #### before the one that counts, a decimal "
            "comma as a point, or take the reward exact or math"
        )
    return float(target in (last_number(completion), last_number(with_decimal_commas(completion))))


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


def resolve_reward(text: str) -> Reward:
    """One of BUILT_IN or IN_PROCESSES, or `module:function`; with weights, or several of them joined: their
    weighted sum. Raises RewardSettingError.
    """
    parts = _parts(text)
    if len(parts) == 1 and parts[0].weight is None:
        return _resolve(text)
    weights = [1.0 if part.weight is None else part.weight for part in parts]
    rewards = [_resolve(part.name) for part in parts]
    titles = [reward.title for reward in rewards]
    for title in titles:
        if titles.count(title) > 1:
            raise RewardSettingError(f"two rewards are called {title}; add name=NAME to one of them")
    return WeightedRewards(text, list(zip(rewards, weights, strict=True)))


def _parts(text: str) -> list[Part]:
    try:
        return parts_of(text)
    except ValueError as error:
        raise RewardSettingError(str(error)) from None


def _resolve(name: str) -> Reward:
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name])
    if name in IN_PROCESSES:
        if reason := IN_PROCESSES[name].missing:
            raise RewardSettingError(f"reward {name!r}: {reason}")
        return Reward(name, IN_PROCESSES[name])
    if name.startswith(SERVED) or is_code(name):
        try:
            function = _with_parameters(name)
        except ValueError as error:
            raise RewardSettingError(str(error)) from None
        if isinstance(function, CodeReward) and (reason := function.missing):
            raise RewardSettingError(f"reward {name!r} cannot run code here: {reason} (docs/sandbox.md)")
        return Reward(name, function)
    _refuse_unknown(name)
    try:
        function = load_function(name)
        refuse_unfit(function)
        function = with_our_parameters(function)
        check_call(function, ("task", "completion"))
    except PluginError as error:
        raise RewardSettingError(str(error)) from error
    return Reward(name, function if is_async(function) else SyncReward(name, function))


def refuse_unknown(text: str) -> None:
    """Raise RewardSettingError if the setting names a built-in reward that there is not. Loads nothing."""
    for part in _parts(text):
        _refuse_unknown(part.name)


def _refuse_unknown(name: str) -> None:
    known = [*BUILT_IN, *IN_PROCESSES]
    if ":" in name or name in known or is_code(name):
        return
    near = difflib.get_close_matches(name, known, n=1)
    if name.endswith(SUFFIX):
        near = [f"{name}:FUNCTION"]
    elif "=" in name or "," in name:
        raise RewardSettingError(
            f"reward {name!r}: give each reward for itself: --reward math=1 --reward length=-0.1"
        )
    elif "." in name:
        near = [":".join(name.rsplit(".", 1))]
    meant, there = f"did you mean {near[0]}? There" if near else "there", ", ".join([*known, CODE])
    raise RewardSettingError(
        f"reward {name!r}: {meant} is {there}, or give module:function or file.py:function"
    )


def _with_parameters(name: str) -> ServedReward | CodeReward:
    return CodeReward(name) if is_code(name) else ServedReward(name)


def weights_by_title(text: str) -> dict[str, float] | None:
    """Return the weight of each reward that a sound setting names, by the name of its metric; None: a single
    reward, which is none.
    """
    parts = parts_of(text)
    if len(parts) == 1 and parts[0].weight is None:
        return None
    is_ours = [part.name.startswith(SERVED) or is_code(part.name) for part in parts]
    titles = [
        _checking(part.name).title if ours else title_of(part.name)
        for part, ours in zip(parts, is_ours, strict=True)
    ]
    return {
        title: 1.0 if part.weight is None else part.weight for title, part in zip(titles, parts, strict=True)
    }


_checking = functools.cache(_with_parameters)  # the check of each task needs it


def check_task(text: str, task: Task) -> None:
    """Raise ValueError if a reward that `text` names, built in or with the parameters of TRL or verl, cannot
    score any completion of the task. The error says what is wrong, "it has no `answer`", and of several
    rewards which one it is.
    """
    parts = parts_of(text)
    for part in parts:
        try:
            _check_task(part.name, task)
        except ValueError as error:
            raise ValueError(f"{part.name}: {error}" if len(parts) > 1 else str(error)) from None


def _check_task(name: str, task: Task) -> None:
    function = BUILT_IN.get(name)
    if name in IN_PROCESSES:
        IN_PROCESSES[name].check(task)
    elif name.startswith(SERVED) or is_code(name):
        _checking(name).check(task)
    elif isinstance(function, SyncReward):  # regex
        pattern_of(task)
    elif function is not None:
        function(task, "")
    elif needed := _lacking(name)(task):
        raise ValueError(f"it has no `{needed[0]}`; {name_of_answer(task, needed[0])}")


@functools.cache
def _lacking(name: str) -> Callable[[dict[str, Any]], list[str]]:
    try:
        return lacking(load_function(name, make=False))
    except PluginError:  # refused, or on its way here, elsewhere
        return lambda task: []


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


def answer_text(task: Task) -> str:
    """Return the answer of a task as a text: a number with all its digits, a whole one without a fraction."""
    if "answer" not in task:
        raise ValueError(f"it has no `answer`; {name_of_answer(task)}")
    value = whole_number(task["answer"])
    return f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value)  # not 1e-05
