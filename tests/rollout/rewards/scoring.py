"""Score a text by a reward."""

import asyncio
from typing import Any

import numpy as np

from rollout.rewards.resolve import resolve_reward
from rollout.rewards.reward import score
from rollout.trajectory import Sample


def make_sample(text: str) -> Sample:
    nothing: Any = np.zeros(0)
    return Sample(nothing, nothing, nothing, finish_reason="stop", text=text)


def scored(name: str, text: str, **task: Any) -> Sample:
    sample = make_sample(text)
    asyncio.run(score(resolve_reward(name), {"id": "t1", "prompt": "p", **task}, sample))
    return sample
