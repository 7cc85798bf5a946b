"""Phase 8: the batch of an iteration, made of its groups and of the groups of the replay window."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from coordinator.directory import manifests, published
from coordinator.directory.decoded_parts import decoded
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase
from coordinator.settings.tree import RunSettings
from rollout.origin import Origin
from rollout.rewards.resolve import weights_by_title
from rollout.settings_tree import Mark, marked
from rollout.storage import files, once
from rollout.tasks.task_set import TaskSet, group_seed
from trainer.batch.batch import Batch, DamagedBatch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class BuiltBatch(NamedTuple):
    """A batch, and what it was made from."""

    batch: Batch
    data: bytes
    """The batch as it is written."""
    window: list[int]
    """The iterations whose groups it was drawn from."""


def begin_batch(node: Node, iteration: Iteration) -> None:
    """Begin to make the batch in the background, on the master, now that the manifest is there: an evaluation
    may come before phase 8.
    """
    run_dir, number, settings = node.run_dir, iteration.number, node.settings
    tasks = node.identity.inputs.tasks
    if node.is_master and iteration.has(Phase.TRAIN_DATA, settings):
        digest = published.manifest_digest(run_dir, number)
        expected = _wanted(digest, settings)
        make = partial(_make, run_dir, number, settings, digest, tasks)
        node.ahead.begin(make, key=(number, expected))


def write_batch(node: Node, iteration: Iteration) -> None:
    """Compute advantages and write the batch, unless one that verifies is there."""
    number = iteration.number

    def take(expected: Mapping[str, Any]) -> BuiltBatch | None:
        return node.ahead.take((number, expected), node.check)

    ensure_batch(node.run_dir, number, node.settings, take, node.identity.inputs.tasks)


def ensure_batch(
    run_dir: RunDir,
    iteration: int,
    settings: RunSettings,
    take: Callable[[Mapping[str, Any]], BuiltBatch | None] = lambda _wanted: None,
    tasks: TaskSet | None = None,
) -> None:
    """Write the batch, unless one is there that verifies, names this manifest and was made by these settings.

    `take` returns what was made ahead from the same, if anything was. Incomplete if a part of the iteration
    is gone or altered: then its manifest is set aside, and the iteration is taken up at its rollout.
    """
    digest = published.manifest_digest(run_dir, iteration)
    batch_json = published.read_json(run_dir.batch(iteration) / "batch.json") or {}
    expected = _wanted(digest, settings)
    if {name: batch_json.get(name) for name in expected} == expected and _verifies(
        run_dir, iteration, batch_json
    ):
        return
    try:
        result = take(expected) or _make(run_dir, iteration, settings, digest, tasks)
    except Incomplete:
        # Without it the iteration is taken up at its rollout: what is whole stays, the rest is made anew.
        path = run_dir.manifest("train", iteration)
        once.withdraw(path, path.with_suffix(".damaged"))
        raise
    except ValueError as error:  # these samples and these settings do not go together
        raise NodeEnded(Exit.FAILED, f"iteration {iteration}: {error}", "failed") from error
    _publish(run_dir, iteration, result, expected)


def _wanted(manifest_sha256: str, settings: RunSettings) -> dict[str, Any]:
    """Return all that a batch depends on, as JSON has it; the manifests have the sampling."""
    trainer = settings.trainer.model_dump(mode="json")
    shaping = {f"trainer.{name}": trainer[name] for name in marked(TrainerSettings, Mark.SHAPES_BATCH)}
    if trainer["sources"]:
        shaping |= {
            "trainer.sources": trainer["sources"],
            "rollout.ratio_field": settings.rollout.ratio_field,
        }
    return {
        "manifest_sha256": manifest_sha256,
        "made_by": {**shaping, "rollout.seed": settings.rollout.seed},
    }


def _make(
    run_dir: RunDir, iteration: int, settings: RunSettings, digest: str, tasks: TaskSet | None
) -> BuiltBatch:
    """Make the batch of the manifest that has this digest.

    Raises Incomplete if a part of the iteration is gone or altered, ValueError as build_batch.
    """
    manifest = published.read_manifest(run_dir, "train", iteration) or {}
    groups = manifests.read_groups(run_dir.trajectories("train", iteration), manifest, decoded)
    older = _older(run_dir, iteration, settings, tasks)
    origin = Origin.from_document(manifest["origin"])
    age = iteration - 1 - origin.policy_iteration
    if (source := manifest.get("rescored")) and age:
        text = "off-policy: iteration %d has the samples of %s; both runs have the policy of iteration %d"
        log.warning(text, iteration, source["directory"], origin.policy_iteration)
    elif age > settings.cluster.max_async_level:
        log.warning("off-policy: iteration %d was generated by the policy of iteration %d, %d trainings ago",
                    iteration, origin.policy_iteration, age)  # fmt: skip
    batch = build_batch(
        groups,
        manifest_sha256=digest,
        policy=origin.policy,
        temperature=origin.sampling.temperature,
        seed=group_seed(settings.rollout.seed, "train", iteration, 0),
        settings=settings.trainer,
        max_tokens=origin.sampling.max_tokens,
        iteration=iteration,
        policy_iteration=origin.policy_iteration,
        older=list(older.values()),
        reward_weights=_weights(settings, origin),
        task_sources=_task_sources(run_dir, iteration, settings, tasks),
    )
    return BuiltBatch(batch, batch.encode(), [*older, iteration])


def _verifies(run_dir: RunDir, iteration: int, batch_json: dict[str, Any]) -> bool:
    try:
        data = files.read(run_dir.batch(iteration) / "batch.safetensors")
        Batch.decode(data)
    except (FileNotFoundError, DamagedBatch):
        return False
    return hashlib.sha256(data).hexdigest() == batch_json["sha256"]


def _weights(settings: RunSettings, origin: Origin) -> dict[str, float] | None:
    """Return the weights of the rewards that samples of this origin have, if the batch needs them."""
    is_decoupled = any(each.advantage == "decoupled" for each in settings.trainer.of_all_sources)
    return weights_by_title(origin.reward.name) if is_decoupled else None


def _task_sources(
    run_dir: RunDir, iteration: int, settings: RunSettings, tasks: TaskSet | None
) -> dict[int, str]:
    """Return the source of each slot's task."""
    if tasks is None:
        return {}
    opened = published.read_json(run_dir.iteration_json(iteration))
    if opened is None and not settings.trainer.sources:  # then nothing but metrics depends on them
        return {}
    if opened is None:
        raise Incomplete(f"{run_dir.iteration_json(iteration)} is missing or damaged")
    field, drawn = settings.rollout.ratio_field, list[int](opened["tasks"])
    return {slot: str(tasks.tasks[index].get(field)) for slot, index in enumerate(drawn)}


def _older(
    run_dir: RunDir, iteration: int, settings: RunSettings, tasks: TaskSet | None
) -> dict[int, ReplayedGroups]:
    """Return the groups of the replay window's iterations before this one, oldest first, with their sampling.

    An iteration whose trajectories are gone or damaged is left out, with a warning.
    """
    by_iteration: dict[int, ReplayedGroups] = {}
    for older in range(max(1, iteration - settings.trainer.replay_window + 1), iteration):
        manifest = published.read_manifest(run_dir, "train", older)
        try:
            if manifest is None:
                raise Incomplete(f"{run_dir.manifest('train', older)} is missing or damaged")
            groups = manifests.read_groups(run_dir.trajectories("train", older), manifest, decoded)
            origin = Origin.from_document(manifest["origin"])
            sampling, policy = origin.sampling, origin.policy_iteration
            weights, sources = _weights(settings, origin), _task_sources(run_dir, older, settings, tasks)
            limits = sampling.temperature, sampling.max_tokens
            by_iteration[older] = ReplayedGroups(groups, *limits, policy, weights, sources)
        except Incomplete as error:
            log.warning("iteration %d is not replayed in iteration %d: %s", older, iteration, error)
    return by_iteration


def _publish(run_dir: RunDir, iteration: int, result: BuiltBatch, expected: Mapping[str, Any]) -> None:
    """Write the batch, then batch.json, which vouches for it."""
    counted = ("reward", "truncated", "groups_used", "samples_used", "samples_replayed")
    batch_json = {
        **expected,
        "window": result.window,
        "sha256": hashlib.sha256(result.data).hexdigest(),
        "sequences": len(result.batch),
        **{name: getattr(result.batch.counts, name) for name in counted},
    }
    directory = run_dir.batch(iteration)
    files.publish(directory / "batch.safetensors", result.data)
    files.publish(directory / "batch.json", json.dumps(batch_json, indent=1).encode())
