"""Environments whose code runs in other processes: there it talks to the policy as an OpenAI client, so that
it may raise, hang or crash without holding the node.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from rollout.environments.policy import Policy
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool
from rollout.trajectory import Sample

LONGEST_S = 7 * 86400.0
"""A bound and no more: a group ends by rollout.group_timeout_s, and its processes with it."""


async def play_outside(
    pool: ProcessPool, policy: Policy, numbers: Sequence[int], *arguments: Any
) -> list[Sample]:
    """Return the samples with these numbers, which one call in `pool` makes: it gets [base_url, api_key] of
    each, then `arguments`. For each it returns {"reward": float, "metrics": {name: float}}, where
    "turn_rewards" and "turn_states" may have one for each turn, or {"error": text}. A sample with an error,
    or whose call fails, is lost. If the call ends its process, all of them are.
    """
    from rollout.environments.openai_proxy import AgentSession  # here, because aiohttp is slow to import

    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(AgentSession(policy.for_sample(j))) for j in numbers]
        places = [[session.base_url, session.api_key] for session in sessions]
        try:
            ends = await pool.wait(places, *arguments, deadline_s=LONGEST_S)
        except (CallFailed, CallLost) as error:
            ends = [{"error": str(error)}] * len(sessions)
        return [
            sample
            for session, end in zip(sessions, ends, strict=True)
            for sample in _scored(session.samples(), end)
        ]


def _scored(samples: list[Sample], end: dict[str, Any]) -> list[Sample]:
    error = end.get("error")
    if error is None and not samples:
        error = "its agent has asked for nothing"
    if error is not None:
        return [lost(" ".join(error.split()))]
    for sample in samples:
        sample.reward, sample.metrics = end["reward"], dict(end["metrics"])
    rewards = end.get("turn_rewards", ())
    if len(samples) == 1 and len(samples[0].generated_turns) == len(rewards):
        samples[0].reward_turns(rewards, end.get("turn_states", ()))
    return samples


def lost(fault: str) -> Sample:
    """Return the Sample that stands for one that could not be made, and says why."""
    nothing = np.zeros(0)
    return Sample(
        nothing.astype(np.int32),
        nothing.astype(np.uint8),
        nothing.astype(np.float32),
        "stop",
        "",
        fault=fault,
    )
