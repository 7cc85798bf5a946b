"""Play environments that are written for the library `verifiers`: --environment verifiers:NAME.

Its agents ask the policy through `serve`, one session for each sample. A process plays the group of a task.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from rollout.environment_variables import cores
from rollout.environments.outside import play_outside
from rollout.environments.policy import Policy
from rollout.loaded_code import package_code
from rollout.origin import Sampling
from rollout.processes.pool import ProcessPool, log_as
from rollout.tasks.task_set import Task
from rollout.tasks.verifiers import SOURCE, config_of, module_of, why_missing
from rollout.trajectory import Sample

log = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Processes, and so groups that are played at the same time, at most; a process takes about 200 MiB."""


def check(name: str, task: Task) -> None:
    """Raise ValueError if a task is not of the environment `name`."""
    spec = task.get("verifiers")
    if spec is None or module_of(spec["name"]) != module_of(name):
        raise ValueError(f"it is not of {name}; give --tasks {SOURCE}{name}")


class VerifiersEnvironment:
    """The environment NAME. Parameters are in the tasks."""

    library = "verifiers"

    def __init__(self, name: str) -> None:
        """Raises ValueError, in one line, if the environment is not installed."""
        if "," in name:
            raise ValueError(f"give its parameters behind --tasks {SOURCE}NAME, not here")
        if reason := why_missing(name):
            raise ValueError(reason)
        self._name = name
        self.behind = package_code(module_of(name))
        size = min(MOST_PROCESSES, cores())
        self._pool = ProcessPool(f"{__name__}:make_player", size=size, say=log_as(name))

    async def __call__(self, task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
        """Return the samples of a task of the environment. The reward is its own."""
        check(self._name, task)
        return await play_outside(self._pool, policy, range(sampling.n), task["verifiers"])


# ---- in the processes


def make_player() -> Callable[[list[list[str]], dict[str, Any]], Any]:
    """Make (sessions, task) -> how each episode has ended; see `play_outside`."""

    def play(sessions: list[list[str]], spec: dict[str, Any]) -> list[dict[str, Any]]:
        return asyncio.run(_play_all(sessions, spec))

    return play


async def _play_all(sessions: list[list[str]], spec: dict[str, Any]) -> list[dict[str, Any]]:
    from verifiers import v1 as vf

    environment = vf.load_environment(config_of(spec["name"], spec["config"]))
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(spec["data"]), environment.config.taskset.task)
    async with environment.serving():
        return await asyncio.gather(
            *(_play(environment, task, j, *session) for j, session in enumerate(sessions))
        )


async def _play(environment: Any, task: Any, j: int, base_url: str, api_key: str) -> dict[str, Any]:
    from verifiers import v1 as vf

    # Programs that the library starts do not inherit a variable with this name.
    os.environ[variable := f"FLAGPOST_API_KEY_{j}"] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig.model_validate({}))
    (slot,) = environment.slots(task)
    episode = await environment.run_slot(slot, context)
    faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if faults or not episode.ok:  # an attempt that was repeated has left a conversation without a reward
        return {"error": f"{faults[-1].type}: {faults[-1].message}" if faults else "its episode has failed"}
    agents = [
        trace
        for trace in episode.traces
        if trace.agent.trainable and trace.agent.config.client.base_url == base_url
    ]
    if len(agents) != 1:
        return {"error": f"the policy plays {len(agents)} agents of the episode, where one can be trained"}
    scores = {name: reward.score for name, reward in agents[0].rewards.items() if reward is not None}
    metrics = {name: value for name, value in agents[0].metrics.items() if value is not None}
    return {"reward": agents[0].reward, "metrics": {**metrics, **scores}}
