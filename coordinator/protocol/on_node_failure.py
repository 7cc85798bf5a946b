"""The policy when a node is lost: a class for each value of cluster.on_node_failure."""

import math

from coordinator.settings.cluster import ClusterSettings


class FailurePolicy:
    """What the three have in common, or most of them."""

    holds = True
    """Whether the others hold when a node is lost, and gather again; else the run ends."""
    shrinks = False
    """Whether an epoch may begin without a node, which is let in later."""
    finishes_share = True
    """Whether the master finishes its share of a phase before it heeds a loss."""

    def gathers_for_s(self, cluster: ClusterSettings, is_after_loss: bool) -> float:
        """Return for how long the master gathers nodes, before it begins without the absent ones."""
        return math.inf

    def left_out_s(self, waited_s: float, master_silent_s: float) -> float:
        """Return for how long a worker that is not let in has waited in vain."""
        return waited_s

    def master_patience_s(self, cluster: ClusterSettings) -> float:
        """Return how long workers wait for a silent master."""
        return cluster.rejoin_timeout_s


class Wait(FailurePolicy):
    """Hold until the lost node is back."""


class Shrink(FailurePolicy):
    """Go on with the nodes that are left."""

    shrinks = True
    finishes_share = False

    def gathers_for_s(self, cluster: ClusterSettings, is_after_loss: bool) -> float:
        return 0.0 if is_after_loss else cluster.node_timeout_s

    def left_out_s(self, waited_s: float, master_silent_s: float) -> float:
        return min(waited_s, master_silent_s)  # the others go on meanwhile, and let it in at their next epoch


class Abort(FailurePolicy):
    """End the run, with exit code 3."""

    holds = False
    finishes_share = False

    def master_patience_s(self, cluster: ClusterSettings) -> float:
        return cluster.node_timeout_s


_POLICIES: dict[str, FailurePolicy] = {"wait": Wait(), "shrink": Shrink(), "abort": Abort()}


def failure_policy(on_node_failure: str) -> FailurePolicy:
    """Return the policy of a value of cluster.on_node_failure."""
    return _POLICIES[on_node_failure]
