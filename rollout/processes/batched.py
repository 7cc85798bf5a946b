"""Reward functions that take lists, as TRL calls them: `reward(completions, prompts, **columns)`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rollout.plugins import is_async

_OURS = ("prompt", "messages", "prompts", "completion", "completions")
"""Fields of a task that are no column here: what they hold is in `prompts`, or would take another's place."""


def for_one_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (task, completion) that calls `function` with lists of one, if it has a parameter
    `completions`; any other function as it is.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # it is written in C
        return function
    if "completions" not in parameters or "completion" in parameters:
        return function
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def lists(task: dict[str, Any], completion: str) -> dict[str, list[Any]]:
        is_chat = "messages" in task
        columns: dict[str, Any] = {name: value for name, value in task.items() if name not in _OURS}
        columns["prompts"] = task["messages"] if is_chat else task.get("prompt")
        columns["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
        return {name: [value] for name, value in columns.items() if takes_all or name in parameters}

    if is_async(function):

        async def score_later(task: dict[str, Any], completion: str) -> float:
            return _only(await function(**lists(task, completion)))

        return functools.update_wrapper(score_later, function)

    def score(task: dict[str, Any], completion: str) -> float:
        return _only(function(**lists(task, completion)))

    return functools.update_wrapper(score, function)


def _only(rewards: Any) -> Any:
    """Return the one reward of a list; None, which is TRL's word for a sample that it does not score, is 0.
    Raises ValueError for anything but a list of one.
    """
    try:
        (reward,) = rewards
    except (TypeError, ValueError):
        raise ValueError(
            "it takes `completions`, so it must return a list with one reward for each; it returned "
            f"{rewards!r:.100} for one"
        ) from None
    return 0.0 if reward is None else reward
