"""Phases 5 and 6: evaluate the policy, if it is due. Each phase's function is short, as in `rollout`."""

import logging
from functools import partial

from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import eval_sets, rollout_steps
from coordinator.phases.collecting import collect_share
from coordinator.phases.node_share import NamedSet, Share
from coordinator.phases.provenance import OWN, agreed_functions, made_with
from coordinator.protocol.phase import Phase
from coordinator.start.eval_tasks import digest_of
from rollout.origin import Sampling
from rollout.quota import Quota
from rollout.tasks.task_set import TaskSet

log = logging.getLogger(__name__)

NONE = TaskSet((), "")
"""No tasks, in the place of those of --eval-tasks where there are named sets alone."""


def is_due(node: Node, iteration: Iteration) -> bool:
    """Return whether the iteration is to be evaluated, by what the settings say now."""
    settings = node.settings
    if not count_slots(node) or settings.rollout_split == "train-only":
        return False
    interval = settings.eval.interval
    return settings.rollout_split == "eval-only" or (interval > 0 and (iteration.number - 1) % interval == 0)


def digest(node: Node) -> str | None:
    """Return the digest of what the policy is evaluated on now; None: on nothing."""
    inputs = node.identity.inputs
    return digest_of(inputs.eval_tasks, inputs.eval_sets)


def count_slots(node: Node) -> int:
    """Count the slots of an evaluation that begins now, those of the named sets too."""
    settings, inputs = node.settings, node.identity.inputs
    sets = eval_sets.chosen_sets(settings, inputs, Sampling())  # which changes no number
    return sets[-1]["end"] if sets else eval_sets.own_slots(settings, inputs)


def decide_eval(node: Node, iteration: Iteration) -> Payload:
    """Decide whether to evaluate, and who generates what."""
    opened = iteration.opened
    slots = opened["eval_slots"]
    if not slots and is_due(node, iteration):
        sets = eval_sets.of_opened(opened)
        slots = sets[-1].end if sets else eval_sets.own_slots(node.settings, node.identity.inputs)
    if node.settings.rollout_split == "train-only":
        slots = 0
    if slots and (change := eval_sets.task_change(opened, node.identity.inputs)):
        log.warning("%s since iteration %d was opened: that iteration is not evaluated",
                    change, iteration.number)  # fmt: skip
        slots = 0
    origin = made_with(iteration, "eval")
    quota, order = Quota(slots, slots), range(slots)
    return {"slots": slots, **rollout_steps.plan(node, iteration, "eval", quota, origin, order)}


def collect_eval(node: Node, iteration: Iteration) -> Payload | None:
    """Generate this node's share of the evaluation, if one is due."""
    plan = iteration.documents[Phase.EVAL_DECISION]
    slots = plan["slots"]
    if not slots:
        return None
    inputs, functions = node.identity.inputs, agreed_functions(node, iteration)
    sets = [
        NamedSet(eval_set, inputs.eval_sets[eval_set.name].tasks, functions[eval_set.name])
        for eval_set in eval_sets.of_opened(iteration.opened)
    ]
    share = Share(
        kind="eval",
        plan=plan,
        quota=Quota(slots, slots),
        order=range(slots),
        tasks=inputs.eval_tasks or NONE,
        origin=made_with(iteration, "eval", functions),
        functions=functions[OWN],
        sets=sets,
        # All of them: the tasks that take longest are not average ones. What is not trained needs no teacher.
        settings=node.settings.rollout.model_copy(
            update={"completion_threshold": 1.0, "over_sample": 1.0, "teacher": None, "teachers": {}}
        ),
    )
    return collect_share(node, iteration, share)


def aggregate_eval(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> None:
    """Publish the evaluation's manifest, once all have generated."""
    slots = iteration.documents[Phase.EVAL_DECISION]["slots"]
    if slots:
        # No flag names the parts: this client may believe what it listed before others had written theirs.
        node.watch.listings.list_anew(node.run_dir.trajectories("eval", iteration.number))
        totals = rollout_steps.sum_short(iteration.documents[Phase.EVAL_DECISION], payloads)
        origin, quota = made_with(iteration, "eval"), Quota(slots, slots)
        scores = partial(
            eval_sets.scores,
            opened=iteration.opened,
            settings=node.settings,
            inputs=node.identity.inputs,
        )
        rollout_steps.aggregate(node, iteration, "eval", quota, origin, totals, {}, range(slots), scores)
