"""What each row does, one short function each, in the order of the protocol table.

An action adopts a durable output that is there; none leaves something in memory that a later one needs.
"""

import hashlib
import json
import logging
import os
from typing import Any

from coordinator import outputs, parts, rollouts, shared_fs
from coordinator.epochs import MASTER
from coordinator.node import Node, Payload
from coordinator.outcome import Ended, Exit
from coordinator.outputs import Incomplete, Policy
from coordinator.phases import Phase
from coordinator.settings import RunSettings
from rollout.engine import Sampling
from rollout.tasks import group_seed, task_order
from trainer.batch import Batch, DamagedBatch, build_batch
from trainer.request import TrainRequest

log = logging.getLogger(__name__)


# ---- 0 iteration_start


def open_iteration(node: Node) -> Payload:
    """Open the iteration (slots and sampling are fixed here, once) and say which rows are left of it."""
    run_dir, iteration = node.run_dir, node.iteration
    policy = _policy_before(node)
    for directory in (run_dir.trajectories("train", iteration), run_dir.trajectories("eval", iteration)):
        shared_fs.make_directory(directory)
    shared_fs.make_directory(run_dir.batch(iteration))
    path = run_dir.iteration_json(iteration)
    if outputs.read_json(path) is None:
        if node.settings.rl_phase == "update":
            text = f"iteration {iteration} has no trajectories to train on; make them with --rl-phase rollout"
            raise Ended(Exit.FAILED, text, "failed")
        shared_fs.create_once(path, json.dumps(_new_iteration(node, policy), indent=1).encode())
    return {
        "resume_at": int(outputs.resume_at(run_dir, node.settings, iteration, policy.digest)),
        "policy": policy.digest,
        "policy_iteration": policy.iteration,
    }


def _policy_before(node: Node) -> Policy:
    """The newest policy older than this iteration, verified once; a damaged one is set aside."""
    run_dir = node.run_dir
    while True:
        number = outputs.latest_before(run_dir, node.iteration)
        trained = max(outputs.trained_iterations(run_dir, node.iteration), default=0)
        try:
            if number > 0 and number not in node.verified:
                outputs.verify_checkpoint(run_dir.checkpoint(number))
                node.verified.add(number)
        except Incomplete as error:
            directory = run_dir.checkpoint(number)
            log.error("DAMAGED CHECKPOINT: %s; it is set aside as %s.damaged", error, directory)
            shared_fs.rename(directory, directory.with_name(f"{directory.name}.damaged"))
            continue
        if number < trained and node.settings.rl_phase != "rollout":
            log.error("the checkpoint of iteration %d is gone: going on from that of %d", trained, number)
        return node.policy(number)


def _new_iteration(node: Node, policy: Policy) -> dict[str, Any]:
    iteration, settings, tasks = node.iteration, node.settings, node.inputs.tasks.tasks
    before = outputs.read_json(node.run_dir.iteration_json(iteration - 1)) or {}
    first = before.get("next_task", (iteration - 1) * settings.rollout.tasks_per_iteration)
    count = settings.rollout.tasks_per_iteration
    return {
        "iteration": iteration,
        "policy": policy.digest,
        "tasks": task_order(len(tasks), settings.rollout.seed, first, count),
        "next_task": first + count,
        "samples_per_task": settings.rollout.samples_per_task,
        "eval_slots": _eval_slots(node) if _is_eval_due(node) else 0,
        "eval_tasks": _eval_digest(node),
    }


def _is_eval_due(node: Node) -> bool:
    settings = node.settings
    if node.inputs.eval_tasks is None or settings.rollout_split == "train-only":
        return False
    interval = settings.eval.interval
    return settings.rollout_split == "eval-only" or (interval > 0 and (node.iteration - 1) % interval == 0)


def _eval_digest(node: Node) -> str | None:
    return node.inputs.eval_tasks.digest if node.inputs.eval_tasks else None


def _eval_slots(node: Node) -> int:
    tasks = node.inputs.eval_tasks
    return min(len(tasks.tasks), node.settings.eval.max_tasks) if tasks else 0


# ---- 1 to 4: training trajectories


def plan_train(node: Node) -> Payload:
    """Split the slots that no part holds yet over the nodes, by weight."""
    opened = _opened(node)
    return {"shares": rollouts.plan(node, "train", len(opened["tasks"]))}


def collect_train(node: Node) -> None:
    """Generate this node's share."""
    opened = _opened(node)
    settings = node.settings.rollout
    sampling = Sampling(
        n=opened["samples_per_task"],
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        stop=settings.stop,
        seed=None,
    )
    share = node.documents[Phase.TRAIN_PLAN]["shares"][str(node.rank)]
    rollouts.collect_share(node, "train", share, opened["tasks"], node.inputs.tasks, sampling)


def name_parts(node: Node) -> Payload:
    """Name this node's parts, with their checksums: the flag vouches for them."""
    directory = node.run_dir.trajectories("train", node.iteration)
    found = parts.read_parts(directory, node.header["policy"], rank=node.rank)
    return {part.name.name: part.sha256 for part in found}


def merge_names(node: Node, payloads: dict[int, Payload]) -> Payload:
    """All names in one document."""
    return {name: sha256 for payload in payloads.values() for name, sha256 in payload.items()}


def write_manifest(node: Node) -> None:
    """Verify every part against its flag and its own checksum, and publish what the iteration consists of."""
    opened = _opened(node)
    rollouts.aggregate(node, "train", len(opened["tasks"]), node.documents[Phase.TRAIN_FILES_READY])


# ---- 5 and 6: evaluation


def decide_eval(node: Node) -> Payload:
    """Whether to evaluate, and who generates what."""
    opened = _opened(node)
    slots = opened.get("eval_slots", 0) or (_eval_slots(node) if _is_eval_due(node) else 0)
    slots = min(slots, _eval_slots(node))
    if node.settings.rollout_split == "train-only":
        slots = 0
    if slots and opened.get("eval_tasks") != _eval_digest(node):
        log.warning("the evaluation tasks have changed since this iteration was opened: it is not evaluated")
        slots = 0
    return {"slots": slots, "shares": rollouts.plan(node, "eval", slots) if slots else {}}


def collect_eval(node: Node) -> None:
    """Generate this node's share of the evaluation, if one is due."""
    plan = node.documents[Phase.EVAL_DECISION]
    if not plan["slots"]:
        return
    settings = node.settings
    sampling = Sampling(
        n=settings.eval.samples_per_task,
        max_tokens=settings.rollout.max_tokens,
        temperature=settings.eval.temperature,
        top_p=1.0,
        stop=settings.rollout.stop,
        seed=None,
    )
    tasks = node.inputs.eval_tasks
    assert tasks is not None
    rollouts.collect_share(
        node, "eval", plan["shares"][str(node.rank)], range(plan["slots"]), tasks, sampling
    )


def aggregate_eval(node: Node, _payloads: dict[int, Payload]) -> None:
    """Publish the evaluation's manifest, once all have generated."""
    slots = node.documents[Phase.EVAL_DECISION]["slots"]
    if slots:
        rollouts.aggregate(node, "eval", slots, {})


# ---- 7 to 12: training


def stop_engine(node: Node) -> None:
    """Free the accelerator for the trainer."""
    node.engine.sleep()


def write_batch(node: Node) -> None:
    """Compute advantages and write the batch, unless one that verifies and names this manifest is there."""
    run_dir, iteration = node.run_dir, node.iteration
    digest = outputs.manifest_digest(run_dir, iteration)
    directory = run_dir.batch(iteration)
    about = outputs.read_json(directory / "batch.json")
    if about and about["manifest_sha256"] == digest and _batch_verifies(node, about):
        return
    manifest = outputs.read_manifest(run_dir, "train", iteration) or {}
    policy = manifest["policy"]
    if policy != node.header["policy"]:
        log.warning("off-policy: iteration %d was generated by %s, training starts from %s",
                    iteration, policy, node.header["policy"])  # fmt: skip
    try:
        groups = parts.read_groups(run_dir.trajectories("train", iteration), manifest)
    except Incomplete:
        # Without it the iteration is taken up at its rollout: what is whole stays, the rest is made anew.
        path = run_dir.manifest("train", iteration)
        shared_fs.rename(path, path.with_suffix(".damaged"))
        raise
    batch = build_batch(
        groups,
        manifest_sha256=digest,
        policy=policy,
        temperature=node.settings.rollout.temperature,
        seed=group_seed(node.settings.rollout.seed, "train", iteration, 0),
    )
    data = batch.encode()
    shared_fs.publish(directory / "batch.safetensors", data)
    about = {
        "manifest_sha256": digest,
        "sha256": hashlib.sha256(data).hexdigest(),
        "sequences": len(batch),
        **{
            name: getattr(batch.counts, name)
            for name in ("reward", "truncated", "groups_used", "samples_used")
        },
    }
    shared_fs.publish(directory / "batch.json", json.dumps(about, indent=1).encode())


def _batch_verifies(node: Node, about: dict[str, Any]) -> bool:
    try:
        data = shared_fs.read(node.run_dir.batch(node.iteration) / "batch.safetensors")
        Batch.decode(data)
    except (FileNotFoundError, DamagedBatch):
        return False
    return hashlib.sha256(data).hexdigest() == about["sha256"]


def configure_training(node: Node) -> Payload:
    """Say where the training job meets, who takes part, and what it reads and writes."""
    record, iteration = node.record, node.iteration
    staging = node.run_dir.staging(iteration, record.epoch)
    shared_fs.make_directory(staging)
    members = sorted(record.members.items())
    about = outputs.read_json(node.run_dir.batch(iteration) / "batch.json")
    if about is None:
        raise Incomplete(f"iteration {iteration} has no batch.json")
    weights = [member.weight / member.processes for _, member in members for _ in range(member.processes)]
    return {
        **node.trainer.meeting(f"e{record.epoch:04d}.i{iteration:06d}", record.members[MASTER].address),
        "processes": {str(rank): member.processes for rank, member in members},
        "node_ranks": {str(rank): number for number, (rank, _) in enumerate(members)},
        "rank_weights": weights,
        "batch_sha256": about["sha256"],
        "staging": staging.name,
    }


def train(node: Node) -> None:
    """This node's part of the training job."""
    config = node.documents[Phase.TRAIN_CONFIG]
    settings, iteration = node.settings, node.iteration
    base = node.policy(node.header["policy_iteration"])
    processes = config["processes"][str(node.rank)]
    threads = settings.trainer.threads_per_process or _threads(processes)
    request = TrainRequest(
        iteration=iteration,
        epoch=node.record.epoch,
        batch_file=str((node.run_dir.batch(iteration) / "batch.safetensors").absolute()),
        batch_sha256=config["batch_sha256"],
        base_dir=str(base.directory.absolute()),
        base_policy=base.digest,
        staging_dir=str((node.run_dir.checkpoints / config["staging"]).absolute()),
        rank_weights=tuple(config["rank_weights"]),
        seed=group_seed(settings.rollout.seed, "train", iteration, 1),
        settings=RunSettings.model_validate(node.record.settings).trainer,  # the same on every node
        temperature=settings.rollout.temperature,
    )
    node.trainer.ensure(config, processes, threads, settings.trainer)
    node.trainer.train(request, processes, node.check_training)
    if not settings.trainer.keep_alive:
        node.trainer.leave_epoch()


def publish_checkpoint(node: Node) -> None:
    """Verify what training wrote, give it its name, and point LATEST to it."""
    run_dir, iteration = node.run_dir, node.iteration
    target = run_dir.checkpoint(iteration)
    if target.name not in outputs.names(run_dir.checkpoints):
        staging = outputs.complete_staging(run_dir, iteration)
        if staging is None:
            raise Incomplete(f"training of iteration {iteration} left no complete checkpoint")
        try:
            result = outputs.verify_checkpoint(staging)
        except Incomplete:  # to be trained again: what is set aside is no staging directory any more
            shared_fs.rename(staging, staging.with_name(f"{staging.name}.damaged"))
            raise
        about = outputs.read_json(run_dir.batch(iteration) / "batch.json") or {}
        wanted = (node.header["policy"], about.get("sha256"))
        if (result.base_policy, result.batch_sha256) != wanted:
            shared_fs.rename(staging, staging.with_name(f"{staging.name}.foreign"))
            raise Incomplete(f"{staging} was trained from another policy or batch; it is set aside")
        shared_fs.rename(staging, target)
        node.verified.add(iteration)
    shared_fs.publish(run_dir.latest, f"{target.name}\n".encode())


def restart_engine(node: Node) -> None:
    """Load the new weights, and check that the engine answers with them."""
    if node.engine.is_there():
        node.engine.ensure(node.policy(node.iteration), node.settings.engine, node.check)


# ---- shared by several rows


def _opened(node: Node) -> dict[str, Any]:
    opened = outputs.read_json(node.run_dir.iteration_json(node.iteration))
    if opened is None:
        raise Incomplete(f"{node.run_dir.iteration_json(node.iteration)} is missing or damaged")
    return opened


def _threads(processes: int) -> int:
    """CPU threads of a training process: what the environment says, else the cores shared among them."""
    set_by_user = os.environ.get("OMP_NUM_THREADS", "")
    return int(set_by_user) if set_by_user.isdigit() else max(1, (os.cpu_count() or 1) // processes)
