"""The environments of several turns that scripts/ has, by what a scripted policy says."""

import asyncio
from types import SimpleNamespace
from typing import Any

from scripts.rounds import stairs


class Scripted:
    """An episode that says one text after the other."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)
        self.prompts: list[str] = []
        self.rewarded: tuple[list[float], list[str]] = [], []

    async def generate(self, prompt: str, max_tokens: int) -> Any:
        self.prompts.append(prompt)
        return SimpleNamespace(text=next(self._texts))

    def sample(self) -> Any:
        return self

    def reward_turns(self, rewards: list[float], states: list[str]) -> None:
        self.rewarded = rewards, states


def test_steps_are_climbed_by_a_digit_and_by_none_in_turns_and_the_last_one_alone_is_rewarded() -> None:
    climbs, stays = Scripted("7", "3", "x", "1", "y"), Scripted(*"x" * 12)
    policy: Any = SimpleNamespace(episode=[climbs, stays].__getitem__)
    sampling: Any = SimpleNamespace(n=2)
    asyncio.run(stairs({"prompt": "P"}, policy, sampling))
    assert climbs.prompts == ["PA: ", " B: ", " B: ", " A: ", " B: "]
    assert climbs.rewarded == ([0, 0, 0, 0, 1], ["step 0", "step 1", "step 1", "step 2", "step 3"])
    assert stays.rewarded == ([0.0] * 12, ["step 0"] * 12)
