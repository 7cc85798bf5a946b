"""The groups that a collector has in flight, and what makes them."""

import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from coordinator.collector.order import Order, RecipeNames
from coordinator.directory.layout import RunDir
from rollout.collect import GroupCollector
from rollout.engines.client import EngineClient
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.engines.model_facts import most_tokens, vocabulary_size
from rollout.engines.special_tokens import read_special_tokens
from rollout.environments.environment import (
    BUILT_IN,
    Environment,
    demonstrates,
    resolve_environment,
    single_turn,
)
from rollout.group_maker import Recipe
from rollout.loaded_code import load_as_it_was
from rollout.rewards.resolve import resolve_reward
from rollout.tally import Tally


class GroupsInFlight:
    """The groups that are in flight, and what makes them: the same from order to order with one key."""

    def __init__(
        self, order: Order, on_begin: Callable[[int], None], on_end: Callable[[], None], tally: Tally
    ) -> None:
        self.key = order.key
        load_as_it_was({name: source for name, source in order.sources.items() if name not in sys.modules})
        recipes = {kind: recipe_of(order, names) for kind, names in order.recipes.items()}
        self._client: EngineClient
        if order.engine is None:
            self._client = LocalTokenizer(Path(order.start_model), RunDir(Path(order.root)).images)
        else:
            engine = order.engine
            self._client = EngineClient(
                engine.url, model=engine.model, request_timeout_s=engine.request_timeout_s,
                retry_s=engine.retry_s, facts=engine.facts, images=RunDir(Path(order.root)).images,
                renderer=None if engine.facts.renders_pictures else LocalTokenizer(order.start_model),
            )  # fmt: skip
        self._entered = AsyncExitStack()
        self.collector = GroupCollector(
            counts=order.quota.counts,
            client=self._client,
            recipes=recipes,
            settings=order.settings,
            segment=order.segment,
            may_all_fail=order.kind == "eval",
            on_begin=on_begin,
            on_end=on_end,
            tally=tally,
        )

    async def enter(self) -> None:
        """Open the connections to the engine."""
        await self._entered.enter_async_context(self._client)

    async def end(self) -> None:
        """Give up what is in flight."""
        await self.collector.end()
        await self._entered.aclose()


def recipe_of(order: Order, names: RecipeNames) -> Recipe:
    """Load a reward and an environment.

    Demonstrations end as what is sampled does. They cannot evaluate a policy: there it answers itself.
    """
    environment: Environment = resolve_environment(names.environment)
    limits: dict[str, int | None] = {}
    if demonstrates(environment) and order.kind == "eval":
        environment = single_turn
    elif demonstrates(environment):
        model = Path(order.start_model)
        limits = {"context": most_tokens(model), "vocabulary": vocabulary_size(model)}
        if environment in BUILT_IN.values():
            special_tokens = read_special_tokens(model)
            ends = (*special_tokens.end_ids, *special_tokens.stop_ids(order.settings.stop))
            environment = partial(environment, end_ids=ends, **limits)
    return Recipe(environment, resolve_reward(names.reward), names.sampling, **limits)
