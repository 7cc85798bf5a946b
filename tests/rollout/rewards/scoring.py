"""Score a text by a reward."""

import asyncio
from typing import Any

import numpy as np

from rollout.rewards.resolve import resolve_reward
from rollout.rewards.reward import Reward, score
from rollout.settings import RolloutSettings
from rollout.trajectory import Sample


def make_sample(text: str) -> Sample:
    nothing: Any = np.zeros(0)
    return Sample(nothing, nothing, nothing, finish_reason="stop", text=text)


async def score_one(
    reward: Reward, task: dict[str, Any], sample: Sample, settings: RolloutSettings | None = None
) -> None:
    for error in await score(reward, task, [sample], settings or RolloutSettings()):
        raise error


def scored(name: str, text: str, **task: Any) -> Sample:
    sample = make_sample(text)
    asyncio.run(score_one(resolve_reward(name), {"id": "t1", "prompt": "p", **task}, sample))
    return sample
