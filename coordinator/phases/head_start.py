"""A head start: nodes make groups of the next iteration while the checkpoint becomes durable (CHECKPOINT).

TRAIN_CONFIG says what that will be, in so far as it follows from what is published, and which slots each node
begins with. The trainers copy the new policy to each node before they write the checkpoint. The
node's engine loads that copy, and the groups are made with it, but nothing of them is published: until the
checkpoint is, the next iteration has no iteration.json, no claims and no parts. What is in flight then goes
on when its phase begins, as it does from one epoch to the next; if the iteration has become another one, it
is given up.
"""

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from coordinator.directory.published import Policy
from coordinator.keeping import resume
from coordinator.machine.copy_entries import StoreError
from coordinator.machine.filesystems import find_mount
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import collecting, rollout, rollout_steps
from coordinator.protocol.phase import Phase
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import WeightsError, policy_digest
from rollout.storage.hashing import FileFacts

log = logging.getLogger(__name__)


def next_iteration_document(node: Node, iteration: Iteration) -> Payload:
    """Return the next iteration's keys in phase 9's document; none where no node may begin with it ahead."""
    settings, number = node.settings, iteration.number
    chosen = settings.checkpoints.head_start
    is_wanted = (
        (not find_mount(node.run_dir.root.resolve()).is_local if chosen is None else chosen)
        and settings.kind == "both"
        and node.run_dir.crew == "main"
        and settings.cluster.max_async_level == 0
        and settings.engine.url is None
        and not settings.trainer.lora.rank
        and settings.trainer.keep_alive
        and number != settings.iterations
        and not node.identity.inputs.functions.demonstrates
    )
    if not is_wanted:
        return {}
    following = Iteration(number + 1)
    unknown = Policy(number, node.run_dir.checkpoint(number), "")  # its digest follows from the training
    opened = rollout.new_iteration(node, following, unknown)
    following.documents[Phase.ITERATION_START] = {"opened": opened}
    quota = resume.quota(opened)
    plan = rollout_steps.split(node, following, "train", range(quota.needed), (), opened["tasks"])
    begun = {"shares": rollout_steps.own_places(plan), "needed": {}, "short": 0, "kept": {}}
    return {"next": {**rollout.opening_document(opened, generates=True), "plan": begun}}


def place_checkpoint(node: Node, iteration: Iteration) -> Path | None:
    """Return where the trainers put this node's copy of the new policy; None: nowhere."""
    is_wanted = "next" in iteration.documents[Phase.TRAIN_CONFIG] and node.settings.engine.url is None
    if not is_wanted or not node.store.is_on_this_machine():
        return None
    try:
        return node.store.begin(node.policies.size_of(iteration.header["base_iteration"]))
    except StoreError as error:
        _warn_once(f"the engine of this node waits for each checkpoint: {error}")
        return None


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def take_over(node: Node, iteration: Iteration, copy: Mapping[str, FileFacts]) -> None:
    """Have the new policy at hand, if the trainers have put its files where place_checkpoint says."""
    if not copy:
        node.store.abandon()
    elif (directory := node.store.adopt(copy)) is not None:
        iteration.copied = Policy(iteration.number, directory, policy_digest(copy))


def run(node: Node, iteration: Iteration) -> None:
    """Wait until the trainers of this node have made the checkpoint durable, and make groups of the next
    iteration meanwhile.
    """
    if iteration.copied is not None and not node.trainer.is_done():
        try:
            _generate(node, iteration, iteration.copied)
        except _CheckpointDurable:
            pass  # before the engine has come up: phase 12 waits for it
        except (EngineError, WeightsError, OSError) as error:  # the checkpoint may be sound all the same
            log.warning("nothing is generated ahead: %s", error)
            node.collector.drop()
    node.trainer.finish()


class _CheckpointDurable(Exception):
    """The checkpoint is durable."""


def _generate(node: Node, iteration: Iteration, policy: Policy) -> None:
    """Make groups of the next iteration with `policy` until the trainers are done."""

    def check() -> None:
        if node.trainer.is_done():  # or it raises
            raise _CheckpointDurable

    node.engine.ensure(policy, node.settings.engine, check)
    following = _following(iteration, policy)
    collecting.begin_share(node, following, rollout.share_of(node, following), node.trainer.is_done)


def _following(iteration: Iteration, policy: Policy) -> Iteration:
    """Return the next iteration as phase 0 will open it, with this policy."""
    upcoming: dict[str, Any] = iteration.documents[Phase.TRAIN_CONFIG]["next"]
    following = Iteration(iteration.number + 1)
    named = {"policy": policy.digest, "policy_iteration": policy.iteration}
    following.documents = {
        Phase.ITERATION_START: {**upcoming, **named, "opened": {**upcoming["opened"], **named}},
        Phase.TRAIN_PLAN: upcoming["plan"],
    }
    return following


def keep(node: Node, iteration: Iteration, policy: Policy) -> Payload:
    """Say what is in flight of the next iteration, now that `policy` was published and is served."""
    copied, in_flight = iteration.copied, node.collector.in_flight
    if copied is not None and policy.directory != copied.directory:
        node.store.remove(copied.directory)  # the engine has it from the checkpoint
    if in_flight is None:
        return {}
    node.events.add("ahead", it=in_flight.iteration, groups=len(in_flight.slots))
    return {"key": in_flight.key, "slots": in_flight.slots}
