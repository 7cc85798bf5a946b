"""Rows 2 and 6 of one node: generate its share, and make the groups durable as they finish.

What is in flight when an epoch ends goes on in the next one, if that makes the same groups; the node says in
`enter` which slots it keeps.
"""

import hashlib
import json
import logging
from collections.abc import Callable

from coordinator.collection import makers
from coordinator.collection.load_policy import serve
from coordinator.collection.node_share import ROWS, Share
from coordinator.collection.ongoing import Ongoing
from coordinator.directory import parts
from coordinator.directory.layout import Kind
from coordinator.directory.published import Incomplete
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.phases import Phase
from rollout.collect import Stopped

log = logging.getLogger(__name__)


def key_of(node: Node, iteration: Iteration, kind: Kind) -> str:
    """Return a digest of all that decides how a row makes its groups: in two epochs with the same key, a
    group that was begun in the one can be finished in the other.
    """
    header, settings = iteration.header, node.settings
    about = [kind, iteration.number, header["policy"], header["opened"], header["code"]]
    about += [part.model_dump(mode="json") for part in (settings.rollout, settings.eval)]
    about += [settings.engine.model_dump(mode="json", exclude={"url"})]  # each node may have its own
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def drop_outdated(node: Node, iteration: Iteration) -> None:
    """Give up what is in flight from the epoch before, if no row of this iteration goes on with it."""
    if node.in_flight is None:
        return
    keys = {key_of(node, iteration, kind) for kind, row in ROWS.items() if iteration.has(row, node.settings)}
    is_ahead = node.in_flight.iteration > iteration.number and iteration.resume_at >= Phase.CHECKPOINT
    if node.in_flight.key not in keys and not is_ahead:
        node.drop_in_flight()


def collect_share(node: Node, iteration: Iteration, share: Share) -> Payload:
    """Generate a share, and make its groups durable as they finish; says how many are short, and what the
    node's pace was.
    """
    node.position.reach(0, 0)
    kept = share.kept(node.rank)
    if not kept:
        node.drop_in_flight()
    if share.is_empty(node.rank):
        return {"short": 0}
    policy = node.policies.of(iteration.header["policy_iteration"])
    if policy.digest != iteration.header["policy"]:
        raise Incomplete(
            f"{policy.directory} holds policy {policy.digest} here, but {iteration.header['policy']} on the "
            "master; give all nodes the same model"
        )
    if makers.generates(node, share):
        serve(node, policy)
    place = (share.kind, iteration.number, node.rank, node.record.epoch, share.origin)
    verify = node.engine.check_serves
    writer = parts.PartWriter(node.run_dir, *place, verify)
    collection = node.in_flight
    if not isinstance(collection, Ongoing):
        collection = node.in_flight = _ongoing(node, iteration, share)
    iteration.ahead_s += collection.ahead_s
    collection.ahead_s = 0.0
    is_paused = False
    try:
        with node.unresponsive.guarding(node.children, lambda: writer.is_writing):
            return collection.run(node, iteration, share, writer)
    except Stopped:
        is_paused = True
        node.check()
        raise
    finally:
        if not is_paused:
            node.drop_in_flight()
        node.outage.persist(writer.flush)


def begin_share(node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]) -> None:
    """Begin a share of an iteration that is not open yet, until `is_over`: what is in flight then is
    `node.in_flight`, and nothing was published. `is_over` is asked again and again, and may raise.

    Where the share cannot be made nothing is in flight: the row itself will say why.
    """
    node.drop_in_flight()
    collection = node.in_flight = _ongoing(node, iteration, share)
    with node.unresponsive.guarding(node.children, lambda: False):
        error = collection.begin(node, iteration, share, is_over)
    if error is not None:
        log.info("nothing is generated ahead any more: %s", error)
        node.drop_in_flight()


def _ongoing(node: Node, iteration: Iteration, share: Share) -> Ongoing:
    return Ongoing(node, share, key_of(node, iteration, share.kind), iteration.number)
