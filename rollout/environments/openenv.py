"""Play the environment of a server of the library OpenEnv: --environment openenv:URL.

Each sample has a session of its own. An observation is a message of the user, and what the model replies is a
field of the action. The reward of a sample is the sum of its steps' rewards.
"""

import asyncio
import hashlib
import itertools
import json

from rollout.engines.answers import RequestRefused
from rollout.environments.outside import lost
from rollout.environments.policy import Episode, Policy
from rollout.environments.text_gym import MOST_TURNS
from rollout.origin import Sampling
from rollout.tally import warn_once
from rollout.tasks.openenv import SOURCE, content_of, rotated, schema_at, urls_of
from rollout.tasks.openenv_client import OpenEnvSession, ServerFault
from rollout.tasks.parameters import parse
from rollout.tasks.task_set import Task
from rollout.tasks.text_gym import STEP_TIMEOUT, state_of
from rollout.trajectory import Sample


def check(name: str, task: Task) -> None:
    """Raise ValueError if a task is not of the environment `name`."""
    if task.get("openenv", {}).get("name") != name:
        raise ValueError(f"it is not of {name}; give --tasks {SOURCE}{name}")


class OpenEnv:
    """The environment at URL, or at several. Parameters are in the tasks."""

    def __init__(self, name: str) -> None:
        """Raises ValueError, in one line, if there is no such server."""
        if parse(name)[1]:
            raise ValueError(f"give its parameters behind --tasks {SOURCE}URL, not here")
        self._name, self._urls = name, urls_of(name)
        self.behind = hashlib.sha256(json.dumps(schema_at(name), sort_keys=True).encode()).hexdigest()
        self._begun = itertools.count()

    async def __call__(self, task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
        """Return the samples of episodes that begin with the task's seed."""
        check(self._name, task)
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(self._play(task, policy.episode(j))) for j in range(sampling.n)]
        return [episode.result() for episode in played]

    async def _play(self, task: Task, episode: Episode) -> Sample:
        urls = rotated(self._urls, next(self._begun))
        try:
            async with OpenEnvSession(urls, task["openenv"][STEP_TIMEOUT], wait=_busy) as session:
                return await _played(task, episode, session)
        except (ServerFault, RequestRefused) as error:
            return lost(" ".join(str(error).split()))


async def _played(task: Task, episode: Episode, session: OpenEnvSession) -> Sample:
    spec, rewards, states = task["openenv"], list[float | None](), list[str]()
    answer = await session.reset({**spec["reset"], "seed": task["seed"]})
    metrics, turns, is_cut = {}, 0, False
    while not (answer.done or is_cut) and turns < MOST_TURNS:
        observed = await asyncio.to_thread(content_of, answer.fields, spec["observation"])
        turn = await episode.generate([{"role": "user", "content": observed}])
        is_cut = turn.finish_reason == "length"  # the budget of tokens, or the context, is used up
        answer = await session.step({spec["action"]: turn.text})
        turns += 1
        metrics |= answer.metrics
        rewards.append(answer.reward)
        states.append(state_of(observed))
    if all(reward is None for reward in rewards):
        raise ServerFault(f"{session.url} gave no reward in {turns} steps")
    sample = episode.sample(metrics={**metrics, "turns": turns})
    sample.reward_turns(rewards, states)
    return sample


def _busy(reason: str) -> None:
    warn_once("busy", f"{reason}: samples wait; start more copies of it, or have it allow more sessions")
