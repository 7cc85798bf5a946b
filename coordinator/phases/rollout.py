"""Phases 0 to 4: one short function for each, in the order of the protocol table.

A phase adopts a durable output that is there, and leaves nothing in memory that a later phase needs.
"""

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from coordinator.collector import unfinished_samples
from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory import claims, manifests, parts, published
from coordinator.directory.decoded_parts import decoded
from coordinator.directory.layout import MASTER
from coordinator.directory.published import Incomplete, Policy
from coordinator.keeping import policy_choice, resume
from coordinator.keeping.old_checkpoints import read_back
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import eval_sets, evaluation, rollout_steps
from coordinator.phases.collecting import collect_share
from coordinator.phases.node_share import Share
from coordinator.phases.provenance import (
    OWN,
    agreed_functions,
    are_servers,
    changes,
    chosen,
    codes_of,
    functions_of,
    is_begun,
    made_with,
)
from coordinator.phases.tasks import draw_tasks
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase, phases_of
from rollout.environments.segments import Segment
from rollout.environments.self_teacher import SelfTeacher
from rollout.quota import Quota
from rollout.storage import files, once

log = logging.getLogger(__name__)

LOOK_RARELY = 4
"""How much rarer a node looks for what it will need later than for what it waits for."""


# ---- 0 iteration_start


def open_iteration(node: Node, iteration: Iteration) -> Payload:
    """Open the iteration: fix what it is made of and with, once, and say which of its phases are left."""
    run_dir, number = node.run_dir, iteration.number
    decoded.forget()
    if number <= node.finished.last(*resume.TRAINS):
        log.warning("iteration %d is trained again: there is no whole checkpoint of it", number)
    elif number > 1 + node.finished.last(*resume.TRAINS) and number in published.checkpoints(run_dir):
        text = "metrics.jsonl has lost the lines of iterations before %d: the run goes on from its checkpoint"
        log.warning(text, number)
    base = policy_choice.base_of(node, iteration)
    for directory in (run_dir.trajectories("train", number), run_dir.trajectories("eval", number)):
        files.make_directory(directory)
    if Phase.TRAINING in phases_of(node.settings.kind):
        files.make_directory(run_dir.batch(number))
    opened, policy = _open(node, iteration, base)
    resume_at = resume.resume_at(run_dir, node.settings, number, policy.digest)
    generates = Phase.TRAIN_ROLLOUT in phases_of(node.settings.kind) and resume_at <= Phase.EVAL_ROLLOUT
    if resume_at > Phase.TRAIN_PLAN:  # an earlier master may have ended before it wrote these
        manifests.ensure_readable(run_dir.manifest("train", number))
        manifests.ensure_readable(run_dir.manifest("eval", number))
    return {
        "resume_at": int(resume_at),
        "policy": policy.digest,
        "policy_iteration": policy.iteration,
        "base": base.digest,
        "base_iteration": base.iteration,
        "verifier": _verifier(node, iteration, base),
        **opening_document(opened, generates),
    }


def opening_document(opened: Mapping[str, Any], generates: bool) -> Payload:
    """Return the header's part about an iteration.json, with the code of its functions if they are used."""
    code = codes_of(functions_of(opened)) if generates else {}
    return {
        # The average of a curriculum is long, and for the master alone.
        "opened": {name: value for name, value in opened.items() if name != "success"},
        "code": {key: asdict(function) for key, function in code.items()},
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
            raise NodeEnded(Exit.FAILED, text, "failed")
        return opened, base
    begun = opened is not None and is_begun(run_dir, number)
    policy = policy_choice.sampler_of(node, iteration, base, opened if begun else None)
    changed = _changes(node, opened, begun) if opened is not None else []
    if opened is not None and not begun and BegunGroup.all_of(opened) != _left_over(node, iteration)[0]:
        changed.append("groups that are begun")  # an evaluation alone has opened it early
    if changed:
        if begun:
            log.warning(
                "iteration %d is finished as it was begun: %s; the changes hold from the next one. To begin "
                "it anew, without its finished groups: run cleanup --iteration %d --log-path %s",
                number, ", ".join(changed), number, shlex.quote(str(run_dir.root)),
            )  # fmt: skip
        else:
            log.info("no group of iteration %d is finished: it is opened anew with the new settings", number)
            node.watch.look()
            node.check()  # no name fences this: let nobody get here who was replaced meanwhile
            once.withdraw(path, path.with_suffix(".unused"))
            opened = None
    if opened is None:
        new = new_iteration(node, iteration, policy)
        is_mine = once.create_once(path, (text := json.dumps(new, indent=1)).encode())
        opened = json.loads(text) if is_mine else published.read_json(path)
    if opened is None:
        raise Incomplete(f"{path} is missing or damaged")
    return opened, policy


def _changes(node: Node, opened: Mapping[str, Any], begun: bool) -> list[str]:
    """List what has changed since an iteration was opened. Of the sets that one that is `begun` cannot be
    evaluated on any more, phase 5 says what that means.
    """
    changed = eval_sets.changed_sets(opened, node.identity.inputs) if begun else ()
    return changes(eval_sets.without(opened, changed), eval_sets.without(_chosen(node), changed))


def _chosen(node: Node) -> dict[str, Any]:
    """Return the entries of iteration.json that the settings decide: what it is made with, and of."""
    quota = Quota.from_settings(node.settings.rollout)
    needed = {"groups": quota.needed, "replace_flat": quota.replace_flat}
    teacher = SelfTeacher.from_settings(node.settings.rollout)
    return {
        **chosen(node.settings, node.identity.inputs),
        **needed,
        "max_async_level": node.settings.cluster.max_async_level,
        "segment_tokens": node.settings.rollout.segment_tokens,
        "teacher": node.settings.rollout.teacher,
        **({"teachers": teachers} if (teachers := node.settings.rollout.teachers) else {}),
        **({"teacher_template": teacher.template} if teacher else {}),
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
    """Read the newest policy back in the background, if the master has asked this node to. While another one
    is still being read, the next one's turn comes.
    """
    if iteration.header["verifier"] == node.rank and node.verifier.is_idle():
        node.verifier.begin(partial(read_back, node.run_dir.checkpoint(iteration.header["base_iteration"])))


def begin_to_fetch(node: Node, iteration: Iteration) -> None:
    """Fetch the policy that samples the next iteration in the background, while this one generates.

    In one crew that generates and trains it is there already if max_async_level is above 0, and is copied
    now instead of later; else it is still to be trained, from the samples of this iteration.
    """
    settings, number = node.settings, iteration.number
    sampler = policy_choice.sampled_by(number + 1, settings)
    is_last = number == settings.iterations
    comes = node.run_dir.crew == "rollout" or (settings.kind == "both" and sampler < number)
    if sampler and comes and not is_last and settings.engine.url is None:
        node.prefetch.begin(sampler, LOOK_RARELY * settings.cluster.pause_bounds_s[1])


def new_iteration(node: Node, iteration: Iteration, policy: Policy) -> dict[str, Any]:
    """Return the iteration.json of an iteration that `policy` samples: it follows from the settings, and from
    the trajectories of the iterations before.
    """
    settings, tasks = node.settings.rollout, node.identity.inputs.tasks
    begun, going_on, again = _left_over(node, iteration)
    drawn = draw_tasks(
        node.run_dir, iteration.number, settings, tasks, Quota.from_settings(settings).slots, again
    )
    return {
        "iteration": iteration.number,
        "policy": policy.digest,
        "policy_iteration": policy.iteration,
        **_chosen(node),
        **drawn,
        "tasks": [*going_on, *drawn["tasks"]],
        "begun": [asdict(group) for group in begun],
        "eval_slots": evaluation.count_slots(node) if evaluation.is_due(node, iteration) else 0,
        "eval_tasks": evaluation.digest(node),
    }


def _left_over(node: Node, iteration: Iteration) -> tuple[list[BegunGroup], list[int], list[int]]:
    """Return the groups that the iteration before has left unfinished; see `unfinished_samples.left_by`."""
    return unfinished_samples.left_by(node.run_dir, iteration.number - 1, _chosen(node))


# ---- 1 to 4: training trajectories


def plan_train(node: Node, iteration: Iteration) -> Payload:
    """Split the slots that no part holds yet among the nodes, by weight."""
    opened = iteration.opened
    if node.guests.have_come:  # what those leave that are killed, or wake too late
        node.flags.leave(claims.left_over(node.run_dir, node.record.epoch, iteration.number))
        node.flags.leave(node.guests.left_behind())
    origin = made_with(iteration, "train")
    return rollout_steps.plan(node, iteration, "train", resume.quota(opened), origin, opened["tasks"])


def collect_train(node: Node, iteration: Iteration) -> Payload:
    """Generate this node's share."""
    payload = collect_share(node, iteration, share_of(node, iteration))
    iteration.progress = node.position.describe()
    return payload


def share_of(node: Node, iteration: Iteration) -> Share:
    """Return this node's Share of the plan of an iteration."""
    opened, functions = iteration.opened, agreed_functions(node, iteration)
    return Share(
        kind="train",
        plan=iteration.documents[Phase.TRAIN_PLAN],
        quota=resume.quota(opened),
        order=opened["tasks"],
        tasks=node.identity.inputs.tasks,
        origin=made_with(iteration, "train", functions),
        functions=functions[OWN],
        settings=node.settings.rollout.model_copy(update=_teacher(node, opened)),
        begun=(begun := BegunGroup.all_of(opened)),
        segment=_segment(iteration, opened) if begun or opened.get("segment_tokens") else None,
    )


def _teacher(node: Node, opened: Mapping[str, Any]) -> dict[str, Any]:
    """Return the teachers that an iteration was opened with; servers where they are now, if they have
    moved.
    """
    opened_teacher, present_teacher = opened.get("teacher"), node.settings.rollout.teacher
    teachers, teachers_now = opened.get("teachers", {}), node.settings.rollout.teachers
    teacher = {
        "teacher": present_teacher if are_servers(opened_teacher, present_teacher) else opened_teacher,
        "teachers": {source: teachers_now.get(source, name) for source, name in teachers.items()},
    }
    return teacher | {name: opened[name] for name in ("teacher_template",) if name in opened}


def _segment(iteration: Iteration, opened: Mapping[str, Any]) -> Segment:
    return Segment(opened.get("segment_tokens"), iteration.number, iteration.header["policy_iteration"])


def sum_short(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    """Count the needed groups that are not made."""
    return rollout_steps.sum_short(iteration.documents[Phase.TRAIN_PLAN], payloads)


def part_checksums(node: Node, iteration: Iteration) -> Payload:
    """Name this node's parts, with their checksums: the flag vouches for them."""
    directory = node.run_dir.trajectories("train", iteration.number)
    origin = made_with(iteration, "train")
    return parts.part_checksums_of(directory, origin, node.rank)


def merge_checksums(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    """Join the names of all nodes in one document."""
    return {name: sha256 for payload in payloads.values() for name, sha256 in payload.items()}


def write_manifest(node: Node, iteration: Iteration) -> None:
    """Verify every part against its flag and its own checksum, and publish the manifest over them."""
    opened, documents = iteration.opened, iteration.documents
    origin = made_with(iteration, "train")
    totals, named = documents[Phase.TRAIN_ROLLOUT], documents[Phase.TRAIN_FILES_READY]
    quota = resume.quota(opened)
    rollout_steps.aggregate(node, iteration, "train", quota, origin, totals, named, opened["tasks"])
