"""A user's own code, as the cluster tests plug it in."""

import asyncio
import os
from typing import Any

from rollout.engine import Sampling
from rollout.environment import Policy, single_turn
from rollout.trajectory import Sample


def digits(_task: dict[str, Any], completion: str) -> float:
    """The share of digits: something that random weights already vary in."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


async def slow(task: dict[str, Any], policy: Policy, sampling: Sampling) -> list[Sample]:
    """Single-turn, and at least SLOW_S seconds a group."""
    await asyncio.sleep(float(os.environ.get("SLOW_S", "0.3")))
    return await single_turn(task, policy, sampling)
