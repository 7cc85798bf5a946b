"""Reward functions with the parameters of TRL, verl or OpenRLHF, taken for those of (task, completion).

TRL calls `reward(completions, prompts, **columns)` with lists, verl `compute_score(data_source, solution_str,
ground_truth, extra_info)` with one sample or, with an `s` behind each name, with lists, OpenRLHF
`reward_func(queries, prompts, labels)` with lists.
"""

import dis
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, pairwise
from types import CodeType
from typing import Any, NamedTuple, cast

from rollout.plugins import PluginError, is_async


class _Convention(NamedTuple):
    """How a function is called."""

    arguments: Callable[[dict[str, Any], str], dict[str, Any]]
    """What it is called with for one sample."""
    result: Callable[..., Any]
    """What its result means; of lists, with the number of samples as the second argument."""
    of_lists: bool = False


_NO_COLUMNS = ("prompt", "messages", "prompts", "completion", "completions")
"""Fields of a task that TRL's functions do not get by their names."""
_OF_TRL = {
    "completion_ids": "rewards are given completions as texts, not their tokens",
    "trainer_state": "TRL's trainer is not here",
    "environments": "TRL's environments are not here",
}
"""What TRL's functions may ask for in vain, and why."""


def with_our_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (task, completion) that calls one with the parameters of the others; any other
    function as it is. Of one that `takes_lists` it is a function of (tasks, completions), which returns a
    list with what each has got.
    """
    parameters = _parameters(function)
    convention = _convention(parameters)
    if convention is None:
        return function
    arguments, result, of_lists = convention
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def call(task: Any, completion: Any, logged: dict[str, float]) -> Any:
        values = _listed(map(arguments, task, completion)) if of_lists else arguments(task, completion)
        if arguments is _arguments_of_trl:
            values |= {"log_metric": logged.__setitem__, "log_extra": lambda _column, _values: None}
        return function(**{name: value for name, value in values.items() if takes_all or name in parameters})

    def meaning(value: Any, completion: Any, logged: dict[str, float]) -> Any:
        if not of_lists:
            return result(value)
        rewards = result(value, len(completion))
        return [{**logged, "reward": reward} for reward in rewards] if logged else rewards

    if is_async(function):

        async def score_later(task: Any, completion: Any) -> Any:
            value = await call(task, completion, logged := dict[str, float]())
            return meaning(value, completion, logged)

        return functools.update_wrapper(score_later, function)

    def score(task: Any, completion: Any) -> Any:
        value = call(task, completion, logged := dict[str, float]())
        return meaning(value, completion, logged)

    return functools.update_wrapper(score, function)


def takes_lists(function: Callable[..., Any]) -> bool:
    """Return whether a function takes lists of samples, as the rewards of TRL and OpenRLHF do."""
    convention = _convention(_parameters(function))
    return convention is not None and convention.of_lists


def _listed(samples: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the arguments of several samples, by name; a column that a sample lacks is None there."""
    samples = [*samples]
    return {name: [each.get(name) for each in samples] for name in dict.fromkeys(chain(*samples))}


def refuse_unfit(function: Callable[..., Any]) -> None:
    """Raise PluginError for a function that makes a reward, and is none, and for one that needs what only TRL
    gives, such as the tokens of completions.
    """
    parameters = _parameters(function)
    for name, reason in _OF_TRL.items():
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and (_convention(parameters) or next(iter(parameters)) == name):
            raise PluginError(
                f"it needs `{name}`, and {reason}; take it out of the parameters, or give it the default None"
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
        arguments = convention.arguments(task, "")
        truth = "ground_truths" if "ground_truths" in arguments else "ground_truth"
        if truth in needed and arguments.get(truth, "") is None:
            return ["answer"]
        return [name for name in needed if name not in arguments and name not in ("log_metric", "log_extra")]

    return of_task


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # it is written in C
        return {}


def _convention(parameters: Mapping[str, inspect.Parameter]) -> _Convention | None:
    """Return how the function is called that has these parameters; None: with (task, completion)."""
    if "completions" in parameters and "completion" not in parameters:
        return _Convention(_arguments_of_trl, _each, of_lists=True)
    if {"solution_str", "ground_truth"} <= parameters.keys():
        return _Convention(_arguments_of_verl, _with_reward)
    if {"solution_strs", "ground_truths"} <= parameters.keys():
        return _Convention(_arguments_of_verl_batches, _each_with_reward, of_lists=True)
    if {"queries", "prompts", "labels"} <= parameters.keys():
        return _Convention(_arguments_of_openrlhf, _with_logs, of_lists=True)
    return None


def _arguments_of_trl(task: dict[str, Any], completion: str) -> dict[str, Any]:
    is_chat = "messages" in task
    columns: dict[str, Any] = {name: value for name, value in task.items() if name not in _NO_COLUMNS}
    columns["prompts"] = task["messages"] if is_chat else task.get("prompt")
    columns["completions"] = [{"role": "assistant", "content": completion}] if is_chat else completion
    return columns


def _arguments_of_verl(task: dict[str, Any], completion: str) -> dict[str, Any]:
    model = task.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    return {
        "data_source": task.get("data_source", task.get("source")),
        "solution_str": completion,
        "ground_truth": task.get("answer") if truth is None else truth,
        "extra_info": task.get("extra_info", task),
    }


def _arguments_of_verl_batches(task: dict[str, Any], completion: str) -> dict[str, Any]:
    return {f"{name}s": value for name, value in _arguments_of_verl(task, completion).items()}


def _arguments_of_openrlhf(task: dict[str, Any], completion: str) -> dict[str, Any]:
    messages: list[Any] = task.get("messages") or [{"content": task.get("prompt")}]
    prompt = "\n".join(str(message["content"]) for message in messages)  # without the chat template
    label = task.get("answer", task.get("label", ""))
    return {"queries": prompt + completion, "prompts": prompt, "labels": label}


def _each(rewards: Any, samples: int) -> list[Any]:
    """Return the rewards of so many samples; None, which is TRL's word for one that it does not score, is 0.
    Raises ValueError for anything that does not hold as many.
    """
    values: list[Any] = []
    if hasattr(rewards, "reshape"):
        values = rewards.reshape(-1).tolist()
    elif isinstance(rewards, Iterable) and not isinstance(rewards, str | Mapping):
        values = [*cast("Iterable[Any]", rewards)]
    if len(values) != samples:
        raise ValueError(
            "it takes lists, so it must return a list with one reward for each; it returned "
            f"{rewards!r:.100} for {samples}"
        )
    return [0.0 if value is None else value for value in values]


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


def _each_with_reward(results: Any, samples: int) -> list[Any]:
    return [_with_reward(result) for result in _each(results, samples)]


def _with_logs(result: Any, samples: int) -> list[Any]:
    """Return the rewards of so many samples, and of OpenRLHF's dict the `rewards` with the `extra_logs`, of
    which one number is that of each sample.
    """
    if not isinstance(result, Mapping):
        return _each(result, samples)
    parts = cast("Mapping[str, Any]", result)
    logs: dict[str, Any] = {"reward": parts.get("rewards"), **parts.get("extra_logs", {})}
    by_name = {name: _of_each(value, samples, name) for name, value in logs.items()}
    return [dict(zip(by_name, values, strict=True)) for values in zip(*by_name.values(), strict=True)]


def _of_each(value: Any, samples: int, name: str) -> list[Any]:
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return [value] * samples if is_number and name != "reward" else _each(value, samples)
