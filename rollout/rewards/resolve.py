"""Load the rewards that the setting `reward` names, and check what they need of a task."""

import difflib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollout.plugins import (
    SUFFIX,
    PluginError,
    check_call,
    is_async,
    is_module_here,
    load_function,
    title_of,
)
from rollout.processes.killable_rewards import LibraryReward, SyncReward
from rollout.processes.reward_signatures import lacking, refuse_unfit, takes_lists, with_our_parameters
from rollout.rewards.builtin import BUILT_IN
from rollout.rewards.code import NAME as CODE
from rollout.rewards.code import CodeReward, is_code
from rollout.rewards.math import math_reward
from rollout.rewards.parts import Part, parts_of, rewards_of_sources
from rollout.rewards.regex import pattern_of
from rollout.rewards.reward import Reward, RewardsBySource, WeightedRewards
from rollout.rewards.served import SERVED, ServedReward
from rollout.tasks.fields import name_of_answer
from rollout.tasks.reasoning_gym import gym_reward
from rollout.tasks.task_set import Task

OF_SOURCE = "rollout.rewards."


class RewardSettingError(ValueError):
    """The setting `reward` names no usable function; or one of `rewards`, with which the text begins."""


def with_setting(option: str, text: str, problem: str) -> str:
    """Return the text of a RewardSettingError with the setting that names the reward. `option`: how that of
    `reward` is typed, `text`: what the error is about.
    """
    is_of_source = problem.startswith(OF_SOURCE)
    return problem if is_of_source else f"{option}{rewards_of_sources(text).general}: {problem}"


IN_PROCESSES: dict[str, LibraryReward] = {"math": math_reward, "reasoning_gym": gym_reward}
"""Rewards of optional libraries. Their processes start with the first completion and end with the node."""


def resolve_reward(text: str) -> Reward:
    """One of BUILT_IN or IN_PROCESSES, or `module:function`; with weights, or several of them joined: their
    weighted sum. With those of sources, RolloutSettings.scoring. Raises RewardSettingError.
    """
    rewards = rewards_of_sources(text)
    general = _resolve_sum(rewards.general)
    if not rewards.by_source:
        return general
    by_source = dict[str, Reward]()
    for source, reward in rewards.by_source.items():
        with _named(source, reward):
            by_source[source] = _resolve_sum(reward)
    return RewardsBySource(text, rewards.field, general, by_source)


def _resolve_sum(text: str) -> Reward:
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
        is_of_lists = takes_lists(function)
        function = with_our_parameters(function)
        check_call(function, ("task", "completion"))
    except PluginError as error:
        raise RewardSettingError(str(error)) from error
    scorer = function if is_async(function) else SyncReward(name, function)
    return Reward(name, scorer, takes_lists=is_of_lists)


def refuse_unknown(text: str) -> None:
    """Raise RewardSettingError if the setting names a built-in reward that there is not. Loads nothing."""
    rewards = rewards_of_sources(text)
    for source, reward in {None: rewards.general, **rewards.by_source}.items():
        with _named(source, reward):
            for part in _parts(reward):
                _refuse_unknown(part.name)


@contextmanager
def _named(source: str | None, reward: str) -> Iterator[None]:
    """Have errors about the reward of a source begin with its setting."""
    try:
        yield
    except RewardSettingError as error:
        named = "" if source is None else f"{OF_SOURCE}{source}={reward}: "
        raise RewardSettingError(f"{named}{error}") from None


def _refuse_unknown(name: str) -> None:
    if name.rpartition(":")[2].partition("/")[0].isdecimal():
        raise RewardSettingError(f"reward {name!r}: a server is named by its address: http://{name}")
    known = [*BUILT_IN, *IN_PROCESSES]
    if ":" in name or name in known or is_code(name):
        return
    near = difflib.get_close_matches(name, known, n=1)
    if name.endswith(SUFFIX) or is_module_here(name):
        near = [f"{name}:FUNCTION"]
    elif "=" in name or "," in name:
        raise RewardSettingError(
            f"reward {name!r}: give each reward for itself: --reward math=1 --reward length=-0.1"
        )
    elif "." in name:
        near = [":".join(name.rsplit(".", 1))]
    guess, known_names = f"did you mean {near[0]}? There" if near else "there", ", ".join([*known, CODE])
    raise RewardSettingError(
        f"reward {name!r}: {guess} is {known_names}, or give module:function or file.py:function"
    )


def _with_parameters(name: str) -> ServedReward | CodeReward:
    return CodeReward(name) if is_code(name) else ServedReward(name)


def weights_by_title(text: str) -> dict[str, float] | None:
    """Return the weight of each reward that a sound setting names, by the name of its metric; None: a single
    reward, which is none. Of the rewards of sources those that are added up.
    """
    if len(texts := rewards_of_sources(text).all()) > 1:
        return {
            title: weight for each in texts for title, weight in (weights_by_title(each) or {}).items()
        } or None
    parts = parts_of(text)
    if len(parts) == 1 and parts[0].weight is None:
        return None
    is_ours = [part.name.startswith(SERVED) or is_code(part.name) for part in parts]
    titles = [
        _checking(part.name).title if is_our_part else title_of(part.name)
        for part, is_our_part in zip(parts, is_ours, strict=True)
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
    parts = parts_of(rewards_of_sources(text).of_task(task))
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
