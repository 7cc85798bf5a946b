"""`run diff`: the first place at which two runs part, and what they were started with that differs."""

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.published import Incomplete, is_part_of_model
from coordinator.protocol.phase import ROLLOUT_OF, Phase
from coordinator.protocol.records import EpochRecord
from coordinator.settings.loading import flatten, option_name, show
from coordinator.settings.number_ranges import listed
from coordinator.settings.tree import SettingsError
from coordinator.start.start import last_start
from rollout.storage import files, hashing
from rollout.trajectory import Group, Sample
from trainer.batch.batch import Batch, DamagedBatch

OPENED = ("tasks", "groups", "replace_flat", "eval_slots", "eval_tasks")
"""What an iteration is made of, by its iteration.json, beside the policy and the code."""
MEASURED = ("reward", "eval_reward", "length", "loss", "grad_norm", "entropy", "kl_engine", "kl_reference")
"""What the lines of metrics.jsonl have in common where all else is equal; the rest is time."""


class FirstDifference(NamedTuple):
    """The first difference between two runs."""

    iteration: int
    phase: Phase
    text: str


class ComparedIterations(NamedTuple):
    """What has been compared of two runs; all lists are of iterations."""

    iterations: list[int]
    samples: list[int]
    weights: list[int]
    parting: FirstDifference | None


def describe_difference(first: Path, second: Path) -> tuple[list[str], bool]:
    """Return lines that say where two runs part, then what they were started with that differs; and whether
    they are equal as far as both go. SettingsError if one of them is no run, or damaged where it is read, or
    if they have no finished iteration in common.
    """
    try:
        runs = Run(first), Run(second)
    except SettingsError as error:  # these are arguments here
        raise SettingsError(str(error).removeprefix("--log-path ")) from None
    try:
        compared = compare(*runs)
    except Incomplete as error:
        raise SettingsError(f"{error}; what is damaged cannot be compared") from None
    if not compared.iterations and compared.parting is None:
        raise SettingsError(
            f"{first} and {second} have no finished iteration in common; wait until both have finished one"
        )
    samples, weights = listed(compared.samples), listed(compared.weights)
    lines = [
        f"A: {first}",
        f"B: {second}",
        f"equal: {listed(compared.iterations)}; of them samples of {samples}, weights of {weights}",
    ]
    if compared.parting is None:
        more = [f"only {name} goes on to iteration {there[-1]}" for name, there in _longer(*runs)]
        lines += ["the runs are equal as far as both go", *more]
    else:
        iteration, phase, text = compared.parting
        lines.append(f"they part in iteration {iteration}, phase {phase.value} ({phase.label}): {text}")
    lines += started_with(last_start(first), last_start(second))
    return lines, compared.parting is None


def _longer(first: Run, second: Run) -> Iterator[tuple[str, list[int]]]:
    theirs = {"A": first.iterations(), "B": second.iterations()}
    for name, other in (("A", "B"), ("B", "A")):
        if theirs[name] and theirs[name][-1] > max(theirs[other], default=0):
            yield name, theirs[name]


def compare(first: Run, second: Run, since: int = 1) -> ComparedIterations:
    """Compare two runs iteration by iteration from `since` on, until they part. What one of them has not kept
    is left out.
    """
    runs = first, second
    samples: dict[Kind, set[int]] = {
        kind: set(first.collected(kind)) & set(second.collected(kind)) for kind in ROLLOUT_OF
    }
    weights = set(published.checkpoints(first.run_dir)) & set(published.checkpoints(second.run_dir))
    lines = [{line["iteration"]: line for line in run.metrics()} for run in runs]
    compared = ComparedIterations([], [], [], None)
    for number in sorted(number for number in set(lines[0]) & set(lines[1]) if number >= since):
        stages: list[Iterator[FirstDifference]] = [_opening(number, *(_opened(run, number) for run in runs))]
        for kind in ROLLOUT_OF:
            if number in samples[kind]:
                stages.append(_groups(number, kind, *(list(run.trajectories(number, kind)) for run in runs)))
        if number in weights:
            stages.append(training_parting(number, *(run.run_dir for run in runs)))
        stages.append(_measured(number, *(of_run[number] for of_run in lines)))
        if (parting := next(itertools.chain.from_iterable(stages), None)) is not None:
            return compared._replace(parting=parting)
        compared.iterations.append(number)
        compared.samples.extend([number] if number in samples["train"] else [])
        compared.weights.extend([number] if number in weights else [])
    return compared


def _opened(run: Run, iteration: int) -> Mapping[str, Any]:
    return published.read_json(run.run_dir.iteration_json(iteration)) or {}


def _opening(
    iteration: int, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[FirstDifference]:
    if not first or not second:  # one of them is removed
        return
    before = first["policy_iteration"], second["policy_iteration"]
    if first["policy"] != second["policy"]:
        policies = f"{first['policy'][:12]} against {second['policy'][:12]}"
        which = f"of iteration {before[0]}" if before[0] == before[1] else "that sample"
        yield FirstDifference(
            iteration, Phase.ITERATION_START, f"the policies {which} are others: {policies}"
        )
    for name in OPENED:
        ours, theirs = first.get(name), second.get(name)
        if ours != theirs:
            yield FirstDifference(iteration, Phase.ITERATION_START, f"{name}: {_values(ours, theirs)}")


def _values(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return f"{ours} against {theirs}"
    lists = cast(list[list[Any]], [ours, theirs])
    pairs = itertools.zip_longest(*lists, fillvalue="nothing")
    place, (left, right) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"{left} against {right} in place {place}"


def _groups(iteration: int, kind: Kind, first: list[Group], second: list[Group]) -> Iterator[FirstDifference]:
    ours, theirs = ({group.slot: group for group in groups} for groups in (first, second))
    for slot in sorted(ours.keys() | theirs.keys()):
        if slot not in ours or slot not in theirs:
            group, name = (ours[slot], "A") if slot in ours else (theirs[slot], "B")
            text = f"only {name} has made it"
        else:
            group = ours[slot]
            text = _of_group(group, theirs[slot])
        if text:
            yield FirstDifference(iteration, ROLLOUT_OF[kind], f"task {group.task_id} (slot {slot}): {text}")


def logprobs_apart(ours: Iterable[Group], theirs: Iterable[Group]) -> float | None:
    """Return how far the logprobs of groups lie apart at most, in nats; None if anything else differs."""
    first, second = ({group.slot: group for group in groups} for groups in (ours, theirs))
    if first.keys() != second.keys():
        return None
    largest = 0.0
    for slot, group in first.items():
        samples: list[Sample] = []
        for sample, other in zip(group.samples, second[slot].samples, strict=False):
            if sample.logprobs.size == other.logprobs.size:
                apart = np.abs(sample.logprobs - other.logprobs)
                largest = max(largest, float(np.nanmax(apart, initial=0)))
                other = replace(other, logprobs=np.where(np.isnan(apart), other.logprobs, sample.logprobs))
            samples.append(other)
        samples += second[slot].samples[len(samples) :]
        if _of_group(group, replace(second[slot], samples=samples)):
            return None
    return largest


def _of_group(ours: Group, theirs: Group) -> str:
    """Say what differs between two groups of one slot; empty: nothing."""
    if ours.task_id != theirs.task_id:
        return f"B has task {theirs.task_id} there"
    if ours.given_up != theirs.given_up:
        return f"given up: {ours.given_up or 'no'} against {theirs.given_up or 'no'}"
    for number, (left, right) in enumerate(zip(ours.samples, theirs.samples, strict=False)):
        if text := _of_sample(left, right):
            return f"sample {number}, {text}"
    if len(ours.samples) != len(theirs.samples):
        return f"{len(ours.samples)} samples against {len(theirs.samples)}"
    return ""


def _of_sample(ours: Sample, theirs: Sample) -> str:
    both = ours, theirs
    place = _first_other(ours.token_ids, theirs.token_ids)
    if place is not None:
        ids = [
            str(sample.token_ids[place]) if place < len(sample.token_ids) else "the end" for sample in both
        ]
        return f"token {place}: {ids[0]} against {ids[1]} (texts {ours.text!r} and {theirs.text!r})"
    place = _first_other(ours.logprobs, theirs.logprobs)
    if place is not None:
        return f"token {place}: logprob {ours.logprobs[place]} against {theirs.logprobs[place]}"
    if ours.reward != theirs.reward:
        return f"reward {ours.reward} against {theirs.reward}, for the same text {ours.text!r}"
    return ""


def _first_other(ours: NDArray[Any], theirs: NDArray[Any]) -> int | None:
    """Return the first place at which two arrays differ, bit by bit; None: nowhere."""
    size = min(ours.size, theirs.size)
    bits = np.dtype(f"V{ours.itemsize}")
    others = np.flatnonzero(ours[:size].view(bits) != theirs[:size].view(bits))
    if others.size:
        return int(others[0])
    return None if ours.size == theirs.size else size


def training_parting(iteration: int, first: RunDir, second: RunDir) -> Iterator[FirstDifference]:
    """Yield how two runs' batches of an iteration differ, then how the weights do; nothing if these are
    equal.
    """
    directories = first.checkpoint(iteration), second.checkpoint(iteration)
    ours, theirs = map(published.read_result, directories)
    if ours.policy == theirs.policy:
        return
    if ours.batch_sha256 != theirs.batch_sha256 and not _same_sequences(iteration, first, second):
        batches = f"{ours.batch_sha256[:12]} against {theirs.batch_sha256[:12]}"
        yield FirstDifference(iteration, Phase.TRAIN_DATA, f"the batches are others: {batches}")
    names = filter(is_part_of_model, ours.files.keys() | theirs.files.keys())
    for name in sorted(names, key=lambda name: (not name.endswith(".safetensors"), name)):  # weights first
        if ours.files.get(name) != theirs.files.get(name):
            text = _of_file(name, *(directory / name for directory in directories))
            yield FirstDifference(iteration, Phase.TRAINING, text)


def _same_sequences(iteration: int, first: RunDir, second: RunDir) -> bool:
    """Return whether two batches differ in the digest of their manifests alone, by which nodes made what."""
    try:
        ours, theirs = (
            Batch.decode(files.read(run_dir.batch(iteration) / "batch.safetensors"))
            for run_dir in (first, second)
        )
    except (FileNotFoundError, DamagedBatch):
        return False
    return replace(ours, manifest_sha256=theirs.manifest_sha256).encode() == theirs.encode()


def _of_file(file: str, ours: Path, theirs: Path) -> str:
    if not file.endswith(".safetensors") or not (files.exists(ours) and files.exists(theirs)):
        return f"{file} differs"
    left, right = _tensors(ours), _tensors(theirs)
    others = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    return f"{len(others)} of {len(left)} tensors of {file} differ, the first is {', '.join(others[:1])}"


def _tensors(path: Path) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and digest of each tensor of a safetensors file."""
    tensors: dict[str, tuple[str, list[int], str]] = {}
    for name, (dtype, shape, begin, end) in tensor_places(path).items():
        digest = hashlib.sha256()
        for piece in hashing.pieces(path, begin, end):
            digest.update(piece)
        tensors[name] = dtype, shape, digest.hexdigest()
    return tensors


def tensor_places(path: Path) -> dict[str, tuple[str, list[int], int, int]]:
    """Return dtype, shape, and first and last byte (exclusive) of each tensor of a safetensors file."""
    (length,) = struct.unpack("<Q", b"".join(hashing.pieces(path, 0, 8)))
    header: dict[str, Any] = json.loads(b"".join(hashing.pieces(path, 8, 8 + length)))
    return {
        name: (entry["dtype"], entry["shape"], *(8 + length + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _measured(
    iteration: int, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[FirstDifference]:
    for name in MEASURED:
        if first.get(name) != second.get(name):
            text = f"{name} {first.get(name)} against {second.get(name)} in metrics.jsonl"
            yield FirstDifference(iteration, Phase.ITERATION_END, text)


def started_with(first: EpochRecord | None, second: EpochRecord | None) -> Iterator[str]:
    """Yield a line for each setting of the last starts, and for each code behind one, that differs."""
    if first is None or second is None:
        return
    ours, theirs = dict(flatten(first.settings)), dict(flatten(second.settings))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            values = (show(settings.get(key)) or "empty" for settings in (ours, theirs))
            yield f"setting {option_name(key)}: {' against '.join(values)}"
    for key in sorted(first.inputs.keys() & second.inputs.keys()):
        left, right = first.inputs[key], second.inputs[key]
        if left.name == right.name and left.digest != right.digest:
            digests = f"digest {left.digest} against {right.digest}"
            yield f"code or content of {option_name(key)} {left.name}: {digests}"
