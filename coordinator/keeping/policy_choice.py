"""Choose the policy that an iteration is trained from, and the one that samples it.

Training of iteration i starts from the policy that iteration i - 1 has made. The samples come from the policy
of iteration max(0, i - 1 - K), K being cluster.max_async_level: from exactly that one, so that a run which
generates and trains at the same time gives the same result as one that takes turns.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.directory import published
from coordinator.directory.published import Incomplete, Policy
from coordinator.keeping import resume
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.settings.tree import RunSettings

log = logging.getLogger(__name__)


def sampled_by(number: int, settings: RunSettings) -> int:
    """Return the iteration whose policy samples iteration `number`."""
    return max(0, number - 1 - settings.cluster.max_async_level)


def awaited_sampler(node: Node, number: int) -> int | None:
    """Return the iteration whose policy a crew that only generates samples iteration `number` with: the one
    of `sampled_by`, or, where only newer ones are there, the oldest of these, since nobody will make it
    again. None: it is not there yet.
    """
    sampler, checkpoints = sampled_by(number, node.settings), published.checkpoints(node.run_dir)
    if sampler == 0 or sampler in checkpoints:
        return sampler
    return min((other for other in checkpoints if sampler < other < number), default=None)


def next_to_run(node: Node, number: int) -> int:
    """Return iteration `number`, the first that is not finished, or an older one whose checkpoint is gone.

    That one is trained again if its manifest is there, so that the run leaves out no update. Where
    metrics.jsonl has lost its last lines, the newest checkpoint is what the run has come to.
    """
    if node.settings.kind in resume.TRAINS:
        checkpoints = published.checkpoints(node.run_dir)
        if checkpoints and checkpoints[-1] >= number:
            return checkpoints[-1]
        next_number = (checkpoints[-1] if checkpoints else 0) + 1
        if next_number < number and published.read_manifest(node.run_dir, "train", next_number) is not None:
            return next_number
    return number


def base_of(node: Node, iteration: Iteration) -> Policy:
    """Return the newest policy older than this iteration, verified once; a damaged one is set aside.

    Raises Incomplete if the iteration that made it can be trained again. A crew that only generates has
    waited for the policy that samples the iteration.
    """
    is_exact = node.run_dir.crew == "rollout"
    while True:
        number = published.latest_before(node.run_dir, iteration.number)
        if is_exact:
            target = sampled_by(iteration.number, node.settings)
            number = awaited_sampler(node, iteration.number)
            number = target if number is None else number
            if number != target:
                _say_gone(target, iteration.number, number)
        try:
            node.policies.verify(number, node.reading())
        except Incomplete as error:
            node.policies.set_aside(number, error)
            if is_exact or next_to_run(node, iteration.number) < iteration.number:
                raise
            continue
        trained = min(node.finished.last(*resume.TRAINS), iteration.number - 1)
        is_gone = number < trained and node.settings.rl_phase != "rollout"
        if is_gone and iteration.number not in published.checkpoints(node.run_dir):
            log.error(
                "the checkpoint of iteration %d is gone: going on from the one of iteration %d",
                trained,
                number,
            )
        return node.policies.policy_of(number)


def sampler_of(node: Node, iteration: Iteration, base: Policy, opened: Mapping[str, Any] | None) -> Policy:
    """Return the policy that samples this iteration; a damaged one is set aside.

    `opened` is the iteration.json of an iteration that has groups: it goes on with the policy that it was
    opened with. If that one is gone, or for a new iteration, the rule above holds; where the policy that it
    names is not there any more, the nearest one is taken.
    """
    target = base.iteration
    if node.settings.kind == "both":
        target = sampled_by(iteration.number, node.settings)
    if opened is not None:
        target = min(opened["policy_iteration"], base.iteration)
    while True:
        checkpoints = [number for number in published.checkpoints(node.run_dir) if number <= base.iteration]
        number = nearest(target, checkpoints)
        if number == base.iteration:
            return base
        try:
            node.policies.verify(number, node.reading())
        except Incomplete as error:
            node.policies.set_aside(number, error)
            continue
        if number != target:
            _say_gone(target, iteration.number, number)
        return node.policies.policy_of(number)


def _say_gone(missing: int, sampled: int, sampler: int) -> None:
    text = "the checkpoint of iteration %d is gone: iteration %d is sampled by that of iteration %d"
    log.error(text, missing, sampled, sampler)


def nearest(target: int, checkpoints: Sequence[int]) -> int:
    """Return the number of `checkpoints` nearest to `target`, of two equally near ones the older.

    0, the model that the run started from, is taken if it is wanted, or if there is no other.
    """
    if target == 0 or not checkpoints:
        return 0
    return min(checkpoints, key=lambda number: (abs(number - target), number))


def served_next(node: Node, iteration: Iteration) -> Policy:
    """Return the policy that samples the iteration after this one, which has just been trained."""
    target = sampled_by(iteration.number + 1, node.settings)
    checkpoints = published.checkpoints(node.run_dir)
    # Published a moment ago: this client may believe an older listing.
    if target and target not in checkpoints:
        checkpoints = published.checkpoints(node.run_dir, node.watch.listings.list_anew)
    return node.policies.policy_of(nearest(target, checkpoints))
