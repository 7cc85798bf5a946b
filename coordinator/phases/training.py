"""Phases 7 to 12, one short function for each: from the manifest to an engine with the new policy."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from coordinator.directory import chain, published
from coordinator.directory.layout import MASTER
from coordinator.directory.published import Incomplete
from coordinator.keeping import policy_choice, trainer_states
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import head_start
from coordinator.phases.load_policy import serve
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import Member
from coordinator.settings.tree import RunSettings
from coordinator.start.estimate import is_whole_on_each_node
from rollout.engines.model_dir import tensor_names
from rollout.environment_variables import cores, omp_threads
from rollout.storage import files
from rollout.tasks.task_set import group_seed
from trainer.documents import Resume, TrainRequest
from trainer.resume import saves_in_background


def stop_engine(node: Node, _iteration: Iteration) -> None:
    """Free the accelerator for the trainer."""
    node.engine.sleep(node.settings.engine)


def configure_training(node: Node, iteration: Iteration) -> Payload:
    """Say where the training job meets, who takes part, and what it reads and writes."""
    record, number = node.record, iteration.number
    node.policies.verify(iteration.header["base_iteration"])  # it may have been read back meanwhile
    staging = node.run_dir.staging(number, record.epoch)
    files.make_directory(staging)
    members = sorted(record.members.items())
    batch_json = published.read_json(node.run_dir.batch(number) / "batch.json")
    manifest = published.read_manifest(node.run_dir, "train", number)
    if batch_json is None or manifest is None:
        raise Incomplete(f"iteration {number} has no batch.json, or no manifest.json")
    resume = Resume()
    if not node.trainer.is_alive():  # else the job has the policy at hand
        base = node.policies.policy_of(iteration.header["base_iteration"])
        resume = trainer_states.resume_from(node.run_dir, base)
    state = None
    if saves_in_background(number, node.settings.trainer.state_interval, len(resume.repeat)):
        state = node.run_dir.trainer_state(number, record.epoch)
        files.make_directory(state)
    weights = [member.weight / member.processes for _, member in members for _ in range(member.processes)]
    return {
        **node.trainer.meeting(f"e{record.epoch:04d}.i{number:06d}", record.members[MASTER].address),
        "processes": {str(rank): member.processes for rank, member in members},
        "node_ranks": {str(rank): number for number, (rank, _) in enumerate(members)},
        "rank_weights": weights,
        "layout": _layout(node, [member for _, member in members]),
        "batch_sha256": batch_json["sha256"],
        "max_tokens": manifest["origin"]["sampling"]["max_tokens"],
        "staging": staging.name,
        "state": state and state.name,
        "resume": resume.model_dump(),
        **head_start.next_iteration_document(node, iteration),
    }


def train(node: Node, iteration: Iteration) -> None:
    """Do this node's part of the training job."""
    config = iteration.documents[Phase.TRAIN_CONFIG]
    settings, number, run_dir = node.settings, iteration.number, node.run_dir
    published_settings = RunSettings.published(node.record.settings)  # the same on every node
    start, base = node.policies.policy_of(0), node.policies.policy_of(iteration.header["base_iteration"])
    model_name, resume = str(start.directory.absolute()), Resume()
    if not node.trainer.holds(config["job"], base.iteration):
        resume = trainer_states.with_local_paths(run_dir, base, Resume.model_validate(config["resume"]))
        if resume.from_start or settings.trainer.lora.rank or settings.trainer.needs_reference:
            start = node.policies.hold(start, node.reading())
        base = node.policies.hold(base, node.reading())
    processes = config["processes"][str(node.rank)]
    threads = settings.trainer.threads_per_process or _threads(processes)
    copy_dir = head_start.place_checkpoint(node, iteration)
    request = TrainRequest(
        iteration=number,
        epoch=node.record.epoch,
        batch_file=str((run_dir.batch(number) / "batch.safetensors").absolute()),
        batch_sha256=config["batch_sha256"],
        base_dir=str(base.directory.absolute()),
        base_policy=base.digest,
        model_dir=str(start.directory.absolute()),
        model_name=model_name,
        resume=resume,
        staging_dir=str((run_dir.checkpoints / config["staging"]).absolute()),
        state_dir=str((run_dir.trainer_states / config["state"]).absolute()) if config["state"] else None,
        images_dir=str(run_dir.images.absolute()),
        profile=_profile(node, number),
        ahead="next" in config,
        copy_dir=copy_dir and str(copy_dir),
        delta=published_settings.checkpoints.delta,
        offload=settings.rl_phase == "both",
        rank_weights=tuple(config["rank_weights"]),
        seed=group_seed(settings.rollout.seed, "train", number, 1),
        settings=published_settings.trainer.model_copy(update={"layout": config["layout"]}),
        max_tokens=config["max_tokens"],
        iterations=published_settings.iterations,
    )
    node.trainer.ensure(config, processes, threads, settings.trainer)
    position = node.position
    copy = node.trainer.train(
        request, processes, node.phase_endings.check_training, position.reach, position.wait_for_space
    )
    if copy_dir is not None:
        head_start.take_over(node, iteration, copy or {})
    if not settings.trainer.keep_alive:
        node.trainer.leave_epoch()


def _layout(node: Node, members: Sequence[Member]) -> str:
    """Return the layout of the training job."""
    trainer = node.settings.trainer
    if len(members) < 2 or not all(member.gpu_bytes for member in members):
        return trainer.layout
    on_host = Counter(member.host for member in members)  # which share its memory
    is_whole = is_whole_on_each_node(
        _shapes(node.policies.policy_of(0).directory),
        trainer,
        [member.processes for member in members],
        [member.gpu_bytes for member in members],
        [
            member.host_bytes / on_host[member.host] if node.settings.rl_phase == "both" else math.inf
            for member in members
        ],
    )
    return "hybrid" if is_whole else trainer.layout


@cache
def _shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in tensor_names(model_dir).items()}


def _profile(node: Node, iteration: int) -> str | None:
    """Return where this node's profile of the iteration goes, if `run profile` asks for one.

    The watch lists requests beside the master's flags, so nothing is looked up where nobody asks. A request
    whose command was killed stays there: it has an answer, and gets no other.
    """
    requests = [request for request in node.watch.board.profiles if request.rank == node.rank]
    names = published.names(node.run_dir.logs(node.rank)) if requests else []
    for request in requests:
        if not any(map(request.is_answer, names)):
            return str(node.run_dir.profile(request, iteration).absolute())
    return None


def publish_checkpoint(node: Node, iteration: Iteration) -> None:
    """Weigh what training wrote, give it its name, and point LATEST to it. It is read back in the background:
    its ranks have hashed what they wrote, and all would wait here meanwhile.
    """
    run_dir = node.run_dir
    target = run_dir.checkpoint(iteration.number)
    if target.name not in published.names(run_dir.checkpoints):
        try:
            _name_staging(node, iteration, target)
        except FileNotFoundError:  # a master that was replaced meanwhile has published it: adopt it
            if target.name not in published.names(run_dir.checkpoints):
                raise
    files.publish(run_dir.latest, f"{target.name}\n".encode(), durable=False)  # for people


def _name_staging(node: Node, iteration: Iteration, target: Path) -> None:
    """Give the complete staging directory of this iteration its name, unless it is damaged or foreign."""
    run_dir, number = node.run_dir, iteration.number
    staging = published.complete_staging(run_dir, number)
    if staging is None:
        raise Incomplete(f"training of iteration {number} left no complete checkpoint")
    try:
        result = published.weigh_checkpoint(staging)
    except Incomplete:  # to be trained again: what is set aside is no staging directory any more
        published.set_aside(staging, "damaged")
        raise
    batch_json = published.read_json(run_dir.batch(number) / "batch.json") or {}
    expected = (iteration.header["base"], batch_json.get("sha256"))
    if (result.base_policy, result.batch_sha256) != expected:
        published.set_aside(staging, "foreign")
        raise Incomplete(f"{staging} was trained from another policy or batch; it is set aside")
    if not any(name.startswith(f"{published.STATE_DIR}/") for name in result.files):
        files.publish(run_dir.trained(number), trainer_states.trained(run_dir, result).to_json())
    base_policy = node.policies.policy_of(0).digest
    chain.write_proof(run_dir, node.identity.run_id, base_policy, staging)
    files.rename(staging, target)
    node.policies.know_usable(number)


def restart_engine(node: Node, iteration: Iteration) -> Payload:
    """Load the weights that sample the next iteration, and check that the engine answers with them."""
    if not node.engine.is_there():
        return {}
    policy = policy_choice.served_next(node, iteration)
    if iteration.copied is not None and iteration.copied.digest != policy.digest:
        node.collector.drop()
    return head_start.keep(node, iteration, serve(node, policy))


def note_in_flight(node: Node, _iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    """Note what the nodes have in flight of the next iteration: its plan leaves that with them."""
    node.promised = payloads
    return {}


def _threads(processes: int) -> int:
    """Return the CPU threads of a training process: as the environment says, else its share of the cores."""
    return omp_threads(os.environ) or max(1, cores() // processes)
