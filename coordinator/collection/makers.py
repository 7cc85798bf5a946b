"""What makes the groups of a share: its environment, and what that asks."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.collection.node_share import Share
from coordinator.directory.layout import Kind
from coordinator.node.node import Node
from coordinator.start.functions import Functions
from rollout.engines.client import EngineClient
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.engines.model_facts import steady_tokens
from rollout.environments.demonstration import end_of_sequence
from rollout.environments.environment import BUILT_IN, Environment, demonstrates, single_turn


def generates(node: Node, share: Share) -> bool:
    """Return whether the share's samples come from the engine."""
    return not demonstrates(environment_of(node, share.kind, share.functions))


def client_of(node: Node, share: Share) -> EngineClient:
    """Return what the share's environment asks: the engine, or a tokenizer where nothing is generated."""
    if not generates(node, share):
        return LocalTokenizer(_start_model(node))
    engine = node.settings.engine
    is_corrected = node.settings.trainer.engine_correction != "off"
    return EngineClient(
        node.engine.url,
        model=node.engine.model,
        request_timeout_s=engine.request_timeout_s,
        retry_s=node.engine.restart_patience_s(engine),
        facts=replace(node.engine.facts, may_force=is_corrected or share.kind == "eval"),
    )


def environment_of(node: Node, kind: Kind, functions: Functions) -> Environment:
    """Return what makes the groups of a share.

    Demonstrations end as the model's sequences do. They cannot evaluate a policy: there it answers itself.
    """
    environment = functions.environment
    if not demonstrates(environment):
        return environment
    if kind == "eval":
        return single_turn
    if environment not in BUILT_IN.values():
        return environment
    model = _start_model(node)
    options: dict[str, Any] = {"end_ids": end_of_sequence(model), "context": steady_tokens(model)}
    return partial(environment, **options)  # the built-in ones take them


def _start_model(node: Node) -> Path:
    """Return a directory of this machine with the model that the run started from."""
    return node.policies.hold(node.policies.of(0), node.reading()).directory
