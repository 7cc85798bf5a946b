"""Reward functions with the parameters that TRL or verl gives them: for those of (task, completion).

TRL calls `reward(completions, prompts, **columns)` with lists, verl `compute_score(data_source, solution_str,
ground_truth, extra_info)` with one sample.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from rollout.plugins import is_async

_NO_COLUMNS = ("prompt", "messages", "prompts", "completion", "completions")
"""Fields of a task that TRL's functions do not get by their names."""


def with_our_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (task, completion) that calls one with TRL's or verl's parameters; any other
    function as it is. One that takes lists gets lists of one.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # it is written in C
        return function
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "completions" in parameters and "completion" not in parameters:
        arguments, result = _arguments_of_trl, _only
    elif {"solution_str", "ground_truth"} <= parameters.keys():
        arguments, result = _arguments_of_verl, _with_reward
    else:
        return function

    def call(task: dict[str, Any], completion: str) -> Any:
        values = arguments(task, completion)
        return function(**{name: value for name, value in values.items() if takes_all or name in parameters})

    if is_async(function):

        async def score_later(task: dict[str, Any], completion: str) -> Any:
            return result(await call(task, completion))

        return functools.update_wrapper(score_later, function)

    def score(task: dict[str, Any], completion: str) -> Any:
        return result(call(task, completion))

    return functools.update_wrapper(score, function)


def _arguments_of_trl(task: dict[str, Any], completion: str) -> dict[str, Any]:
    is_chat = "messages" in task
    columns: dict[str, Any] = {name: value for name, value in task.items() if name not in _NO_COLUMNS}
    columns["prompts"] = task["messages"] if is_chat else task.get("prompt")
    columns["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
    return {name: [value] for name, value in columns.items()}


def _arguments_of_verl(task: dict[str, Any], completion: str) -> dict[str, Any]:
    model = task.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    return {
        "data_source": task.get("data_source", task.get("source")),
        "solution_str": completion,
        "ground_truth": task.get("answer") if truth is None else truth,
        "extra_info": task.get("extra_info", task),
    }


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


def _with_reward(result: Any) -> Any:
    """Return a number as it is, and a dict, in which verl has a `score`, with that as `reward`."""
    if not isinstance(result, Mapping):
        return result
    scores = cast("Mapping[str, Any]", result)
    return {"reward" if name == "score" else name: value for name, value in scores.items()}
