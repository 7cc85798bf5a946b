"""Environments make samples of a task: by one generation, or by any number of turns."""

import difflib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.environments import openenv, text_gym, verifiers
from rollout.environments.calculator import calculator
from rollout.environments.demonstration import demonstration
from rollout.environments.labelled import labelled
from rollout.environments.openenv import OpenEnv
from rollout.environments.policy import Policy
from rollout.environments.preference import preference
from rollout.environments.python_tool import LIMITS, python
from rollout.environments.text_gym import TextGym
from rollout.environments.thinking import think_and_answer
from rollout.environments.turns import opening, sample_of
from rollout.environments.verifiers import VerifiersEnvironment
from rollout.origin import Sampling
from rollout.plugins import SUFFIX, PluginError, check_call, is_module_here, load_function, may_be_async
from rollout.sandbox.run import why_no_sandbox
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample

if TYPE_CHECKING:
    from rollout.environments.openai_proxy import AgentSession

Environment = Callable[[Task, Policy, Sampling], Awaitable[list[Sample]]]
"""Makes the group of a task: `sampling.n` samples. One that has the attribute `demonstrates = True` generates
none of them: it gets a tokenizer and no engine.
"""


class EnvironmentSettingError(ValueError):
    """The setting `environment` names no usable function."""


def demonstrates(environment: Environment) -> bool:
    """Return whether the environment's samples are given, not generated."""
    function = environment.func if isinstance(environment, partial) else environment
    return getattr(function, "demonstrates", False) is True


async def single_turn(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Answer the task's prompt, or its messages through the chat template, `sampling.n` times. The model has
    the task's `tools`, whose calls end its answer.
    """
    prompt, policy = opening(task), policy.for_task(task)
    if sampling.thinking_tokens is not None:
        return await think_and_answer(prompt, policy, sampling)
    return [sample_of(completion) for completion in await policy.generate(prompt, n=sampling.n)]


def serve(policy: Policy, j: int = 0) -> "AgentSession":
    """Let another program's agent make sample j. `async with serve(policy, j) as session:` opens an
    OpenAI-compatible server at `session.base_url`; see Session.
    """
    from rollout.environments.openai_proxy import AgentSession  # here, because aiohttp is slow to import

    return AgentSession(policy.for_sample(j))


BUILT_IN: dict[str, Environment] = {
    "single_turn": single_turn,
    "calculator": calculator,
    "demonstration": demonstration,
    "preference": preference,
    "labelled": labelled,
    "python": python,
}


OUTSIDE: dict[str, Callable[[str], Environment]] = {
    "verifiers": VerifiersEnvironment,
    "gym": TextGym,
    "openenv": OpenEnv,
}
"""By what its name begins with: what makes an environment whose code runs elsewhere. It gives the rewards
itself.
"""
CHECKS: dict[str, Callable[[str, Task], None]] = {
    "verifiers": verifiers.check,
    "gym": text_gym.check,
    "openenv": openenv.check,
}


def check_played(name: str, task: Task) -> None:
    """Raise ValueError for a task that an environment whose code runs elsewhere cannot play, and for one of
    such an environment with a built-in one. Loads none.
    """
    kind, _, parameter = name.partition(":")
    for other in CHECKS if name in BUILT_IN else ():
        spec: Any = task.get(other)
        if isinstance(spec, dict) and "name" in spec:
            raise ValueError(f"it is of another one; give --environment {other}:{spec['name']}")
    if kind in CHECKS:
        CHECKS[kind](parameter, task)


def resolve_environment(name: str) -> Environment:
    """Return one of BUILT_IN, one of OUTSIDE that e.g. `verifiers:NAME` names, or what `module:function`
    names: an async function, or an object that is called like one. Raises
    EnvironmentSettingError.
    """
    if name == "python" and (reason := why_no_sandbox(LIMITS)) is not None:
        raise EnvironmentSettingError(f"no program can run here: {reason} (docs/sandbox.md)")
    if name in BUILT_IN:
        return BUILT_IN[name]
    kind, _, parameter = name.partition(":")
    if kind in OUTSIDE:
        try:
            return OUTSIDE[kind](parameter)
        except ValueError as error:
            raise EnvironmentSettingError(str(error)) from None
    if ":" not in name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        near = [f"{name}:FUNCTION"] if name.endswith(SUFFIX) or is_module_here(name) else near
        guess = f"did you mean {near[0]}? There" if near else "there"
        raise EnvironmentSettingError(
            f"environment {name!r}: {guess} is {', '.join(BUILT_IN)}, verifiers:NAME, gym:MODULE:CLASS and "
            "openenv:URL, or give module:function or file.py:function"
        )
    try:
        function = load_function(name, only_async=True)
        check_call(function, ("task", "policy", "sampling"))
    except PluginError as error:
        raise EnvironmentSettingError(str(error)) from error
    if not may_be_async(function):
        raise EnvironmentSettingError(
            "it is not async; write `async def`, and `await` what the policy generates"
        )
    return function
