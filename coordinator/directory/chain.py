"""The chain of digests of a run: base policy, samples, batch and checkpoint of each kept iteration.

A checkpoint's proof.json names its links, so that they are known when batch and samples are gone.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.directory import manifests, published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from rollout.engines.model_dir import policy_digest
from rollout.storage import files, hashing
from trainer.documents import PROOF, RESULT, TrainResult


@dataclass
class Chain:
    """What was read of a run's chain; all lists but `broken` are of iterations."""

    checkpoints: list[int] = field(default_factory=list[int])
    batches: list[int] = field(default_factory=list[int])
    samples: list[int] = field(default_factory=list[int])
    broken: list[str] = field(default_factory=list[str])
    """Each link that does not hold, with the iteration, the file and both digests."""


def write_proof(run_dir: RunDir, run_id: str, base_policy: str, directory: Path) -> None:
    """Write the proof of a checkpoint in its staging directory. `base_policy`: the digest of the model that
    the run started from.
    """
    document = {"run_id": run_id, "base_policy": base_policy, **_proof(run_dir, directory)}
    files.publish(directory / PROOF, json.dumps(document, indent=1).encode() + b"\n")


def _proof(run_dir: RunDir, directory: Path) -> dict[str, Any]:
    """Return the keys of a checkpoint's proof besides run and base; `samples_sha256` is the digest of the
    manifest, null if the batch is not kept.
    """
    result = published.read_result(directory)
    batch = published.read_json(run_dir.batch(result.iteration) / "batch.json") or {}
    return {
        "iteration": result.iteration,
        "trained_from": result.base_policy,
        "samples_sha256": batch.get("manifest_sha256"),
        "batch_sha256": result.batch_sha256,
        "result_sha256": hashlib.sha256(files.read(directory / RESULT)).hexdigest(),
        "policy": result.policy,
    }


def read_chain(run_dir: RunDir, base_policy: str, only: Collection[int] = ()) -> Chain:
    """Read all that is kept of the iterations that have a checkpoint, or of `only` these, and compare every
    digest. `base_policy`: the digest of the model that the run started from.
    """
    chain, known = Chain(), {0: base_policy}
    checkpoints = published.checkpoints(run_dir)
    for number in checkpoints:
        try:
            known[number] = published.read_result(run_dir.checkpoint(number)).policy
        except Incomplete:
            continue  # said below
    for number in only or checkpoints:
        chain.broken += [
            f"iteration {number}: {problem}" for problem in _links(chain, run_dir, number, known)
        ]
    return chain


def _links(chain: Chain, run_dir: RunDir, number: int, known: dict[int, str]) -> Iterator[str]:
    """Yield a line for each link of an iteration that does not hold, from its checkpoint back to samples."""
    directory = run_dir.checkpoint(number)
    try:
        result = published.verify_checkpoint(directory)
    except Incomplete as error:
        yield str(error).splitlines()[0]
        return
    chain.checkpoints.append(number)
    model = {name: facts for name, facts in result.files.items() if published.is_part_of_model(name)}
    if result.policy != (weights := policy_digest(model)):
        yield f"{directory / published.RESULT} names the policy {result.policy}, its weights are {weights}"
    before = [known[earlier] for earlier in known if earlier < number]
    if result.base_policy not in before and (number - 1 in known):
        yield (
            f"{directory / published.RESULT} was trained from the policy {result.base_policy}; that of "
            f"iteration {number - 1} is {known[number - 1]}"
        )
    yield from _proven(run_dir, directory, known[0])
    yield from _batch(chain, run_dir, number, result, known)


def _proven(run_dir: RunDir, directory: Path, base_policy: str) -> Iterator[str]:
    """Yield where a checkpoint's proof names another digest; older versions have written none."""
    path = directory / PROOF
    if path.name not in published.names(directory):
        return
    written = published.read_json(path) or {}
    for name, digest in {"base_policy": base_policy, **_proof(run_dir, directory)}.items():
        if digest is not None and written.get(name) != digest:
            yield f"{path} has {name} {str(written.get(name))[:16]}, it is {str(digest)[:16]}"


def _batch(
    chain: Chain, run_dir: RunDir, number: int, result: TrainResult, known: dict[int, str]
) -> Iterator[str]:
    directory = run_dir.batch(number)
    if "batch.json" not in published.names(directory):
        return
    document = published.read_json(directory / "batch.json") or {}
    chain.batches.append(number)
    if document.get("sha256") != result.batch_sha256:
        yield _differs(
            directory / "batch.json", document.get("sha256"), "the checkpoint", result.batch_sha256
        )
    batch = directory / "batch.safetensors"
    if batch.name in published.names(directory):
        digest = hashing.file_facts(batch)["sha256"]
        if digest != result.batch_sha256:
            yield _differs(batch, digest, "the checkpoint", result.batch_sha256)
    path = run_dir.manifest("train", number)
    if path.name not in published.names(path.parent):
        return
    chain.samples.append(number)
    digest = hashlib.sha256(files.read(path)).hexdigest()
    if digest != document.get("manifest_sha256"):
        yield _differs(path, digest, "batch.json", document.get("manifest_sha256"))
        return  # what it says of the parts is not to be trusted
    yield from _samples(run_dir, number, published.read_json(path) or {}, known)


def _samples(run_dir: RunDir, number: int, manifest: dict[str, Any], known: dict[int, str]) -> Iterator[str]:
    sampler = manifest["origin"]["policy_iteration"]
    is_own = "rescored" not in manifest  # else the samples are of a policy of the run that it comes from
    if is_own and known.get(sampler, manifest["policy"]) != manifest["policy"]:
        path = run_dir.manifest("train", number)
        yield _differs(path, manifest["policy"], f"the policy of iteration {sampler}", known[sampler])
    for entry in manifest["parts"]:
        try:
            manifests.read_groups(run_dir.trajectories("train", number), {"parts": [entry]})
        except Incomplete as error:
            yield str(error)


def _differs(path: Any, digest: object, where: str, other: object) -> str:
    return f"{path} has the digest {str(digest)[:16]}, by {where} it is {str(other)[:16]}"
