"""A collection on an engine that is none."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollout.collect import GroupCollector
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.group_maker import Recipe
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import ListedSlots, Slot
from rollout.trajectory import Group

EXACT = resolve_reward("exact")


def with_recipes(made_with: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a collector whose slots, but for those of `others`, are made in one way."""
    recipe = Recipe(*(made_with.pop(name) for name in ("environment", "reward", "sampling")))
    return {**made_with, "recipes": {"": recipe, **made_with.pop("others", {})}}


async def collect(
    slots: Sequence[Slot],
    *,
    needed: int | None = None,
    on_group: Callable[[Group], None],
    stop: threading.Event,
    **made_with: Any,
) -> int:
    """Make groups of `slots` until `needed` of them count (default: one for each slot), or until no slot is
    left; see `GroupCollector`. Whatever ends it, nothing of it goes on.
    """
    collector = GroupCollector(**with_recipes(made_with))
    try:
        return await collector.run(ListedSlots(slots, needed), on_group, stop)
    finally:
        await collector.end()


class FakeClient(EngineClient):
    """Answers every prompt with its own text after `delay_s`; keeps count of the samples in flight."""

    def __init__(
        self, *, delay_s: float = 0.001, fail: Callable[[str], Exception | None] = lambda _: None
    ) -> None:
        super().__init__("http://127.0.0.1:1")
        self.delay_s, self.fail = delay_s, fail
        self.in_flight = self.most_in_flight = 0
        self.cancelled = 0

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        self.in_flight += sampling.n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= sampling.n
        if error := self.fail(prompt):
            raise error
        return [Completion([3], [4], [-0.5], prompt, "stop") for _ in range(sampling.n)]


def slots(count: int) -> list[Slot]:
    return [
        Slot(i, {"id": f"t{i}", "prompt": f"p{i}", "answer": f"p{i}"}, seed=100 * i) for i in range(count)
    ]


def run(
    client: EngineClient, work: list[Slot], settings: dict[str, Any] | None = None, **changes: Any
) -> tuple[list[Group], BaseException | None]:
    """The groups handed over, and what the collection raised; the loop must be left without a task."""
    groups: list[Group] = []
    arguments: dict[str, Any] = {
        "client": client,
        "environment": single_turn,
        "reward": EXACT,
        "sampling": Sampling(n=4),
        "settings": RolloutSettings(**{"concurrency": 16, "group_timeout_s": 30.0, **(settings or {})}),
        "on_group": groups.append,
        "stop": threading.Event(),
        **changes,
    }

    async def main() -> BaseException | None:
        failure: BaseException | None = None
        try:
            await collect(work, **arguments)
        except Exception as error:
            failure = error
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return failure

    return groups, asyncio.run(main())
