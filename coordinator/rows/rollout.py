"""What rows 0 to 6 do: one short function for each, in the order of the protocol table.

A row adopts a durable output that is there, and leaves nothing in memory that a later row needs.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from coordinator.directory import parts, published
from coordinator.directory.layout import MASTER, Kind
from coordinator.directory.published import Incomplete, Policy
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.phases import Phase, rows_of
from coordinator.rows import lineage, prefixes, resume, trajectories
from coordinator.rows.origins import agreed_functions, changes, chosen, functions_of, is_begun, origin_of
from coordinator.rows.prefixes import Begun
from coordinator.rows.tasks import draw_tasks
from coordinator.rows.trajectories import Share
from rollout.environments.segments import Segment
from rollout.origin import Origin
from rollout.quota import Quota
from rollout.storage import files, once

log = logging.getLogger(__name__)

LOOK_RARELY = 4
"""How much rarer a node looks for what it will need later than for what it waits for."""


# ---- 0 iteration_start


def open_iteration(node: Node, iteration: Iteration) -> Payload:
    """Open the iteration: fix what it is made of and with, once, and say which of its rows are left."""
    run_dir, number = node.run_dir, iteration.number
    if number <= node.finished.last(*resume.TRAINS):
        log.warning("iteration %d is trained again: there is no whole checkpoint of it", number)
    base = lineage.base_of(node, iteration)
    for directory in (run_dir.trajectories("train", number), run_dir.trajectories("eval", number)):
        files.make_directory(directory)
    if Phase.TRAINING in rows_of(node.settings.kind):
        files.make_directory(run_dir.batch(number))
    opened, policy = _open(node, iteration, base)
    resume_at = resume.resume_at(run_dir, node.settings, number, policy.digest)
    generates = Phase.TRAIN_ROLLOUT in rows_of(node.settings.kind) and resume_at <= Phase.EVAL_ROLLOUT
    if resume_at > Phase.TRAIN_PLAN:  # an earlier master may have ended before it wrote these
        parts.ensure_readable(run_dir.manifest("train", number))
        parts.ensure_readable(run_dir.manifest("eval", number))
    return {
        "resume_at": int(resume_at),
        "policy": policy.digest,
        "policy_iteration": policy.iteration,
        "base": base.digest,
        "base_iteration": base.iteration,
        # The average of a curriculum is long, and for the master alone.
        "opened": {name: value for name, value in opened.items() if name != "success"},
        "verifier": _verifier(node, iteration, base),
        "code": {key: asdict(code) for key, code in functions_of(opened).codes().items()}
        if generates
        else {},
    }


def _open(node: Node, iteration: Iteration, base: Policy) -> tuple[dict[str, Any], Policy]:
    """Return the iteration.json and the policy that samples the iteration. The file is made once, but made
    anew while nothing has been made with it.
    """
    run_dir, number = node.run_dir, iteration.number
    path = run_dir.iteration_json(number)
    opened = published.read_json(path)
    if node.settings.rl_phase == "update":
        if opened is None:
            text = f"iteration {number} has no trajectories to train on; make them with --rl-phase rollout"
            raise Ended(Exit.FAILED, text, "failed")
        return opened, base
    begun = opened is not None and is_begun(run_dir, number)
    policy = lineage.sampler_of(node, iteration, base, opened if begun else None)
    changed = changes(opened, _chosen(node)) if opened is not None else []
    if opened is not None and not begun and Begun.all_of(opened) != _left_over(node, iteration)[0]:
        changed.append("groups that are begun")  # an evaluation alone has opened it early
    if changed:
        if begun:
            log.warning("iteration %d is finished as it was begun: %s; the changes hold from the next one",
                        number, ", ".join(changed))  # fmt: skip
        else:
            log.info("no group of iteration %d is finished: it is opened anew with the new settings", number)
            node.watch.look()
            node.check()  # no name fences this: let nobody get here who was replaced meanwhile
            once.withdraw(path, path.with_suffix(".unused"))
            opened = None
    if opened is None:
        once.create_once(path, json.dumps(_new_iteration(node, iteration, policy), indent=1).encode())
    opened = published.read_json(path)
    if opened is None:
        raise Incomplete(f"{path} is missing or damaged")
    return opened, policy


def _chosen(node: Node) -> dict[str, Any]:
    """Return what the settings say that an iteration is made with, and of."""
    quota = Quota.of(node.settings.rollout)
    needed = {"groups": quota.needed, "replace_flat": quota.replace_flat}
    return {
        **chosen(node.settings, node.identity.inputs),
        **needed,
        "max_async_level": node.settings.cluster.max_async_level,
        "segment_tokens": node.settings.rollout.segment_tokens,
    }


def _verifier(node: Node, iteration: Iteration, base: Policy) -> int | None:
    """Return the rank that reads the newest policy back meanwhile; None: nobody has to.

    The workers take turns: one that is slow, or has failed, is not asked again at once. A crew that only
    generates leaves it to the one that trains.
    """
    generates_only = node.run_dir.crew == "rollout"
    if base.iteration == 0 or generates_only or node.policies.is_verified(base.iteration):
        return None
    workers = sorted(set(node.record.members) - {MASTER})
    return workers[iteration.number % len(workers)] if workers else MASTER


def begin_to_verify(node: Node, iteration: Iteration) -> None:
    """Read the newest policy back in the background, if the master has asked this node to."""
    if iteration.header["verifier"] == node.rank:
        node.verifier.begin(node.run_dir.checkpoint(iteration.header["base_iteration"]))


def begin_to_fetch(node: Node, iteration: Iteration) -> None:
    """Fetch the policy that samples the next iteration in the background, while this one generates.

    In one crew that generates and trains it is there already if max_async_level is above 0, and is copied
    now instead of later; else it is still to be trained, from the samples of this iteration.
    """
    settings, number = node.settings, iteration.number
    sampler = lineage.sampled_by(number + 1, settings)
    is_last = number == settings.iterations
    comes = node.run_dir.crew == "rollout" or (settings.kind == "both" and sampler < number)
    if sampler and comes and not is_last and settings.engine.url is None:
        node.prefetch.begin(sampler, LOOK_RARELY * settings.cluster.pause_bounds_s[1])


def _new_iteration(node: Node, iteration: Iteration, policy: Policy) -> dict[str, Any]:
    settings, tasks = node.settings.rollout, node.identity.inputs.tasks
    begun, going_on, again = _left_over(node, iteration)
    drawn = draw_tasks(node.run_dir, iteration.number, settings, tasks, Quota.of(settings).slots, again)
    return {
        "iteration": iteration.number,
        "policy": policy.digest,
        "policy_iteration": policy.iteration,
        **_chosen(node),
        **drawn,
        "tasks": [*going_on, *drawn["tasks"]],
        "begun": [asdict(one) for one in begun],
        "eval_slots": _eval_slots(node) if _is_eval_due(node, iteration) else 0,
        "eval_tasks": _eval_digest(node),
    }


def _left_over(node: Node, iteration: Iteration) -> tuple[list[Begun], list[int], list[int]]:
    """Return what the iteration before has left unfinished; see prefixes.left_by."""
    return prefixes.left_by(node.run_dir, iteration.number - 1, _chosen(node))


def _is_eval_due(node: Node, iteration: Iteration) -> bool:
    settings = node.settings
    if node.identity.inputs.eval_tasks is None or settings.rollout_split == "train-only":
        return False
    interval = settings.eval.interval
    return settings.rollout_split == "eval-only" or (interval > 0 and (iteration.number - 1) % interval == 0)


def _eval_digest(node: Node) -> str | None:
    return node.identity.inputs.eval_tasks.digest if node.identity.inputs.eval_tasks else None


def _eval_slots(node: Node) -> int:
    tasks = node.identity.inputs.eval_tasks
    return min(len(tasks.tasks), node.settings.eval.max_tasks) if tasks else 0


# ---- 1 to 4: training trajectories


def plan_train(node: Node, iteration: Iteration) -> Payload:
    """Split the slots that no part holds yet among the nodes, by weight."""
    opened = _opened(iteration)
    return trajectories.plan(
        node, iteration, "train", resume.quota(opened), _origin(iteration, opened, "train")
    )


def collect_train(node: Node, iteration: Iteration) -> Payload:
    """Generate this node's share."""
    opened = _opened(iteration)
    share = Share.of(
        iteration.documents[Phase.TRAIN_PLAN],
        node.rank,
        kind="train",
        quota=resume.quota(opened),
        order=opened["tasks"],
        tasks=node.identity.inputs.tasks,
        origin=_origin(iteration, opened, "train"),
        functions=agreed_functions(node, iteration, opened),
        settings=node.settings.rollout,
        begun=(begun := Begun.all_of(opened)),
        segment=_segment(iteration, opened) if begun or opened.get("segment_tokens") else None,
    )
    return trajectories.collect_share(node, iteration, share)


def _segment(iteration: Iteration, opened: Mapping[str, Any]) -> Segment:
    return Segment(opened.get("segment_tokens"), iteration.number, iteration.header["policy_iteration"])


def sum_short(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    """Count the needed groups that are not made."""
    return trajectories.sum_short(iteration.documents[Phase.TRAIN_PLAN], payloads)


def name_parts(node: Node, iteration: Iteration) -> Payload:
    """Name this node's parts, with their checksums: the flag vouches for them."""
    directory = node.run_dir.trajectories("train", iteration.number)
    origin = _origin(iteration, _opened(iteration), "train")
    found = parts.read_parts(directory, origin, rank=node.rank)
    return {part.name.name: part.sha256 for part in found}


def merge_names(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    """Join the names of all nodes in one document."""
    return {name: sha256 for payload in payloads.values() for name, sha256 in payload.items()}


def write_manifest(node: Node, iteration: Iteration) -> None:
    """Verify every part against its flag and its own checksum, and publish the manifest over them."""
    opened, documents = _opened(iteration), iteration.documents
    origin = _origin(iteration, opened, "train")
    short, named = documents[Phase.TRAIN_ROLLOUT]["short"], documents[Phase.TRAIN_FILES_READY]
    trajectories.aggregate(node, iteration, "train", resume.quota(opened), origin, short, named)


# ---- 5 and 6: evaluation


def decide_eval(node: Node, iteration: Iteration) -> Payload:
    """Decide whether to evaluate, and who generates what."""
    opened = _opened(iteration)
    slots = opened["eval_slots"] or (_eval_slots(node) if _is_eval_due(node, iteration) else 0)
    if node.settings.rollout_split == "train-only":
        slots = 0
    if slots and opened["eval_tasks"] != _eval_digest(node):
        log.warning("the evaluation tasks have changed since this iteration was opened: it is not evaluated")
        slots = 0
    origin = _origin(iteration, opened, "eval")
    return {"slots": slots, **trajectories.plan(node, iteration, "eval", Quota(slots, slots), origin)}


def collect_eval(node: Node, iteration: Iteration) -> Payload:
    """Generate this node's share of the evaluation, if one is due."""
    plan = iteration.documents[Phase.EVAL_DECISION]
    slots = plan["slots"]
    if not slots:
        return {"short": 0}
    opened, tasks = _opened(iteration), node.identity.inputs.eval_tasks
    assert tasks is not None
    share = Share.of(
        plan,
        node.rank,
        kind="eval",
        quota=Quota(slots, slots),
        order=range(slots),
        tasks=tasks,
        origin=_origin(iteration, opened, "eval"),
        functions=agreed_functions(node, iteration, opened),
        # All of them: the tasks that take longest are not average ones.
        settings=node.settings.rollout.model_copy(update={"completion_threshold": 1.0, "over_sample": 1.0}),
    )
    return trajectories.collect_share(node, iteration, share)


def aggregate_eval(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> None:
    """Publish the evaluation's manifest, once all have generated."""
    slots = iteration.documents[Phase.EVAL_DECISION]["slots"]
    if slots:
        short = trajectories.sum_short(iteration.documents[Phase.EVAL_DECISION], payloads)["short"]
        origin = _origin(iteration, _opened(iteration), "eval")
        trajectories.aggregate(node, iteration, "eval", Quota(slots, slots), origin, short, {})


# ---- shared by several rows


def _origin(iteration: Iteration, opened: Mapping[str, Any], kind: Kind) -> Origin:
    """Return what this iteration's parts are made with."""
    return origin_of(opened, kind, iteration.header["policy"], iteration.header["policy_iteration"])


def _opened(iteration: Iteration) -> dict[str, Any]:
    """Return the iteration.json as the master has read it: while it may be made anew, a client may remember
    the one before.
    """
    return iteration.header["opened"]
