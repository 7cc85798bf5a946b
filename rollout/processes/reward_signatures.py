"""Reward functions with the parameters of TRL, verl or OpenRLHF, taken for those of (task, completion).

TRL calls `reward(completions, prompts, **columns)` with lists, verl `compute_score(data_source, solution_str,
ground_truth, extra_info)` with one sample, OpenRLHF `reward_func(queries, prompts, labels)` with lists.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import CodeType
from typing import Any, cast

from rollout.plugins import PluginError, is_async

_Convention = tuple[Callable[[dict[str, Any], str], dict[str, Any]], Callable[[Any], Any]]
"""What to call a function with, and what its result means."""
_NO_COLUMNS = ("prompt", "messages", "prompts", "completion", "completions")
"""Fields of a task that TRL's functions do not get by their names."""


def with_our_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (task, completion) that calls one with the parameters of the others; any other
    function as it is. One that takes lists gets lists of one.
    """
    parameters = _parameters(function)
    convention = _convention(parameters)
    if convention is None:
        return function
    arguments, result = convention
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

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


def library_of_lists(function: Callable[..., Any]) -> str | None:
    """Return the library, TRL or OpenRLHF, whose rewards take lists as this function does; it gets lists of
    one sample. None for any other function.
    """
    arguments, _ = _convention(_parameters(function)) or (None, None)
    if arguments is _arguments_of_trl:
        return "TRL"
    return "OpenRLHF" if arguments is _arguments_of_openrlhf else None


def refuse_unfit(function: Callable[..., Any]) -> None:
    """Raise PluginError for a function that makes a reward, and is none, and for one that needs the tokens of
    completions, as TRL's functions may; rewards are given texts here.
    """
    parameters = _parameters(function)
    tokens = parameters.get("completion_ids")
    if (
        tokens is not None
        and tokens.default is tokens.empty
        and (_convention(parameters) or next(iter(parameters)) == tokens.name)
    ):
        raise PluginError(
            "it needs `completion_ids`, and rewards are given completions as texts, not their tokens; take "
            "it out of the parameters, or give it the default None"
        )
    if not {"task", "completion", "completions"} & parameters.keys() and _returns_reward(function):
        raise PluginError(
            "it makes a reward function, and is none; write into its file, e.g., `my_reward = "
            f"{function.__name__}(...)`, and name my_reward"
        )


def _returns_reward(function: Callable[..., Any]) -> bool:
    """Return whether a function certainly returns one that it defines, with parameters of TRL's rewards."""
    code = getattr(function, "__code__", None)
    inner = {
        constant.co_name
        for constant in getattr(code, "co_consts", ())
        if isinstance(constant, CodeType)
        and {"completions", "completion_ids"} & {*constant.co_varnames[: constant.co_argcount]}
    }
    steps = pairwise(dis.get_instructions(code)) if code and inner else ()
    return any(before.argval in inner and step.opname == "RETURN_VALUE" for before, step in steps)


def lacking(function: Callable[..., Any]) -> Callable[[dict[str, Any]], list[str]]:
    """Return a function that lists the fields that a task lacks for `function`, where that has the parameters
    of another library's rewards; of any other function it lists none.
    """
    parameters = _parameters(function)
    convention = _convention(parameters)
    if convention is None:
        return lambda task: []
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    def of_task(task: dict[str, Any]) -> list[str]:
        arguments = convention[0](task, "")
        if "ground_truth" in needed and arguments.get("ground_truth", "") is None:
            return ["answer"]
        return [name for name in needed if name not in arguments]

    return of_task


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # it is written in C
        return {}


def _convention(parameters: Mapping[str, inspect.Parameter]) -> _Convention | None:
    """Return how the function is called that has these parameters; None: with (task, completion)."""
    if "completions" in parameters and "completion" not in parameters:
        return _arguments_of_trl, _only
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _arguments_of_verl, _with_reward
    if {"queries", "prompts", "labels"} <= parameters.keys():
        return _arguments_of_openrlhf, _with_logs
    return None


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


def _arguments_of_openrlhf(task: dict[str, Any], completion: str) -> dict[str, Any]:
    messages: list[Any] = task.get("messages") or [{"content": task.get("prompt")}]
    prompt = "\n".join(str(message["content"]) for message in messages)  # without the chat template
    label = task.get("answer", task.get("label", ""))
    return {"queries": [prompt + completion], "prompts": [prompt], "labels": [label]}


def _only(rewards: Any) -> Any:
    """Return the one reward of a list; None, which is TRL's word for a sample that it does not score, is 0.
    Raises ValueError for anything but a list of one.
    """
    try:
        (reward,) = rewards
    except (TypeError, ValueError):
        raise ValueError(
            "it takes lists, so it must return a list with one reward for each; it returned "
            f"{rewards!r:.100} for one"
        ) from None
    return 0.0 if reward is None else reward


def _with_reward(result: Any) -> Any:
    """Return a number as it is, and a dict, in which verl has a `score`, with that as `reward`, and without
    the texts, such as `pred`, that verl only logs.
    """
    if not isinstance(result, Mapping):
        return result
    scores = cast("Mapping[str, Any]", result)
    return {
        "reward" if name == "score" else name: value
        for name, value in scores.items()
        if name in ("score", "reward") or not isinstance(value, str | None)
    }


def _with_logs(result: Any) -> Any:
    """Return the one reward of a list, and of OpenRLHF's dict the `rewards` with the `extra_logs`."""
    if not isinstance(result, Mapping):
        return _number(result)
    parts = cast("Mapping[str, Any]", result)
    logs = {name: _number(value) for name, value in parts.get("extra_logs", {}).items()}
    return {**logs, "reward": _number(parts.get("rewards"))}


def _number(values: Any) -> Any:
    """Return the only number of a list, or of a tensor of any shape, as a number."""
    return values.item() if hasattr(values, "item") else _only(values) if isinstance(values, list) else values
