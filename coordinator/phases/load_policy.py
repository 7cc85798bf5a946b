"""Make a policy answer: by this node's engine, or of the server that the user runs."""

from coordinator.directory.published import Policy
from coordinator.machine.weights import Adapters
from coordinator.node.node import Node


def serve(node: Node, policy: Policy) -> Policy:
    """Have the engine answer with `policy`; EngineError if that cannot be had. Returns it from where it was
    loaded.

    The node's own engine loads a copy on this machine. A server that the user runs may be unable to read it,
    and loads from the shared directory.
    """
    settings, count_bytes = node.settings, node.reading()
    base = node.policies.policy_of(0) if settings.trainer.lora.rank else None
    if settings.engine.url is None:
        base = base and node.policies.hold(base, count_bytes)
        policy = node.policies.hold(policy, count_bytes)
    adapters = base and Adapters(base, settings.trainer.lora.rank)
    node.engine.ensure(policy, settings.engine, node.check, adapters)
    return policy
