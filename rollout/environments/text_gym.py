"""Play an environment with Gymnasium's interface: --environment gym:MODULE:CLASS.

Each observation is a message of the user, each action what the model replies. The reward of a sample is the
sum of its steps' rewards. A process plays one sample at a time.
"""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from rollout.environment_variables import cores
from rollout.environments.outside import play_outside
from rollout.environments.policy import Policy
from rollout.loaded_code import load_as_it_was, package_code
from rollout.origin import Sampling
from rollout.plugins import module_of
from rollout.processes.pool import ProcessPool, log_as
from rollout.tasks.task_set import Task
from rollout.tasks.text_gym import (
    SOURCE,
    STEP_TIMEOUT,
    STEP_TIMEOUT_S,
    TextEnvironment,
    code_behind,
    state_of,
)
from rollout.trajectory import Sample

log = logging.getLogger(__name__)

PROCESSES_A_CORE = 4
"""Most of the time a process waits for the model."""
MOST_TURNS = 100
"""Longest episode; the budget of tokens ends most of them earlier."""


def check(name: str, task: Task) -> None:
    """Raise ValueError if a task is of another environment than `name`, or tells it nothing. One of a file
    has no name, but what `reset` gets.
    """
    if task.get("gym", {}).get("name", name) != name:
        raise ValueError(f"it is not of {name}; give --tasks {SOURCE}{name}")
    if not {"gym", "seed", "options"} & task.keys():
        raise ValueError(
            "it has no `seed` and no `options` for reset, so it would be ignored; give --tasks "
            f"{SOURCE}{name} as well"
        )


class TextGym:
    """The environment behind a name. Parameters are in the tasks."""

    def __init__(self, name: str) -> None:
        """Raises ValueError, in one line, if there is no such environment."""
        if "," in name:
            raise ValueError(f"give its parameters behind --tasks {SOURCE}NAME, not here")
        loaded = code_behind(name)
        self._name = name
        self.behind = package_code(module_of(name).partition(".")[0])
        size = PROCESSES_A_CORE * cores()
        self._pool = ProcessPool(f"{__name__}:make_player", name, loaded, size=size, say=log_as(name))

    async def __call__(self, task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
        """Return the samples of an episode with the task's `seed` and `options`, if it has them."""
        check(self._name, task)
        spec = task.get("gym", {"parameters": {}, STEP_TIMEOUT: STEP_TIMEOUT_S})
        arguments = spec["parameters"], spec[STEP_TIMEOUT], task.get("seed"), task.get("options")
        async with asyncio.TaskGroup() as group:
            episodes = [
                group.create_task(play_outside(self._pool, policy, [j], *arguments))
                for j in range(sampling.n)
            ]
        return [sample for episode in episodes for sample in episode.result()]


# ---- in the processes


def make_player(name: str, loaded: dict[str, Any]) -> Callable[..., Any]:
    """Make (sessions, parameters, limit of a step, seed, options) -> how it has ended, as `play_outside`."""
    load_as_it_was(loaded)

    def play(
        sessions: list[list[str]], parameters: dict[str, Any], limit_s: float, seed: Any, options: Any
    ) -> Any:
        (session,) = sessions
        environment = TextEnvironment(name, parameters, limit_s)
        try:
            return [_episode(environment, seed, options, *session)]
        finally:
            environment.close()

    return play


def _episode(
    environment: TextEnvironment, seed: int | None, options: Any, base_url: str, api_key: str
) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": environment.reset(seed, options)}]
    rewards: list[float] = []
    metrics: dict[str, float] = {}
    ends = False
    while not ends and len(rewards) < MOST_TURNS:
        action, is_cut = _reply(messages, base_url, api_key)
        observation, reward, ends, measured = environment.step(action)
        rewards.append(reward)
        metrics |= measured
        ends = ends or is_cut  # the budget of tokens, or the context, is used up
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    metrics = {"turns": len(rewards), **metrics}
    states = [state_of(message["content"]) for message in messages[:-1:2]]
    return {"reward": sum(rewards), "turn_rewards": rewards, "turn_states": states, "metrics": metrics}


def _reply(messages: list[dict[str, Any]], base_url: str, api_key: str) -> tuple[str, bool]:
    """Return the model's text, and whether it was cut."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(request) as answer:
            (choice,) = json.load(answer)["choices"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the policy answers {error.code}: {error.read(2000).decode()}") from None
    return choice["message"]["content"] or "", choice["finish_reason"] == "length"
