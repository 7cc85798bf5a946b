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
    """Return lines that say from where on two runs differ, then which settings and code do; and whether
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
    where = [f"A: {first}", f"B: {second}"]
    if compared.parting is None:
        verdict = "A and B are equal as far as both go"
        where += [f"only {name} goes on to iteration {iterations[-1]}" for name, iterations in _longer(*runs)]
    else:
        iteration, phase, text = compared.parting
        verdict = f"A and B differ from iteration {iteration} on, first in {phase.label}: {text}"
    differences = started_with(last_start(first), last_start(second))
    return [verdict, *where, _equal_text(compared), *differences], compared.parting is None


def _equal_text(compared: ComparedIterations) -> str:
    """Return which iterations are equal, and of which of them both runs have kept samples and weights."""
    if not compared.iterations:
        return "no iteration is equal"
    iterations = {"samples": compared.samples, "weights": compared.weights}
    parts = [
        f"{name} of {listed(numbers)}" if numbers else f"no {name}" for name, numbers in iterations.items()
    ]
    return f"equal iterations: {listed(compared.iterations)}, by metrics, {' and '.join(parts)}"


def _longer(first: Run, second: Run) -> Iterator[tuple[str, list[int]]]:
    iterations = {"A": first.iterations(), "B": second.iterations()}
    for name, other in (("A", "B"), ("B", "A")):
        if iterations[name] and iterations[name][-1] > max(iterations[other], default=0):
            yield name, iterations[name]


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
        whose = f"of iteration {before[0]}" if before[0] == before[1] else "that sample"
        yield FirstDifference(iteration, Phase.ITERATION_START, f"the policies {whose} differ: {policies}")
    for name in OPENED:
        value_a, value_b = first.get(name), second.get(name)
        if value_a != value_b:
            yield FirstDifference(iteration, Phase.ITERATION_START, f"{name}: {_values(value_a, value_b)}")


def _values(value_a: Any, value_b: Any) -> str:
    if not isinstance(value_a, list) or not isinstance(value_b, list):
        return f"{value_a} against {value_b}"
    lists = cast(list[list[Any]], [value_a, value_b])
    pairs = itertools.zip_longest(*lists, fillvalue="nothing")
    place, (item_a, item_b) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"{item_a} against {item_b} in place {place}"


def _groups(iteration: int, kind: Kind, first: list[Group], second: list[Group]) -> Iterator[FirstDifference]:
    groups_a, groups_b = ({group.slot: group for group in groups} for groups in (first, second))
    for slot in sorted(groups_a.keys() | groups_b.keys()):
        if slot not in groups_a or slot not in groups_b:
            group, name = (groups_a[slot], "A") if slot in groups_a else (groups_b[slot], "B")
            text = f"only {name} has made it"
        else:
            group = groups_a[slot]
            text = _of_group(group, groups_b[slot])
        if text:
            yield FirstDifference(iteration, ROLLOUT_OF[kind], f"task {group.task_id} (slot {slot}): {text}")


def logprobs_apart(groups_a: Iterable[Group], groups_b: Iterable[Group]) -> float | None:
    """Return how far the logprobs of groups lie apart at most, in nats; None if anything else differs."""
    first, second = ({group.slot: group for group in groups} for groups in (groups_a, groups_b))
    if first.keys() != second.keys():
        return None
    largest = 0.0
    for slot, group in first.items():
        samples: list[Sample] = []
        for sample, other in zip(group.samples, second[slot].samples, strict=False):
            if sample.logprobs.size == other.logprobs.size:
                gaps = np.abs(sample.logprobs - other.logprobs)
                largest = max(largest, float(np.nanmax(gaps, initial=0)))
                other = replace(other, logprobs=np.where(np.isnan(gaps), other.logprobs, sample.logprobs))
            samples.append(other)
        samples += second[slot].samples[len(samples) :]
        if _of_group(group, replace(second[slot], samples=samples)):
            return None
    return largest


def _of_group(group_a: Group, group_b: Group) -> str:
    """Say what differs between two groups of one slot; empty: nothing."""
    if group_a.task_id != group_b.task_id:
        return f"B has task {group_b.task_id} there"
    if group_a.given_up != group_b.given_up:
        return f"given up: {group_a.given_up or 'no'} against {group_b.given_up or 'no'}"
    for number, (sample_a, sample_b) in enumerate(zip(group_a.samples, group_b.samples, strict=False)):
        if text := _of_sample(sample_a, sample_b):
            return f"sample {number}, {text}"
    if len(group_a.samples) != len(group_b.samples):
        return f"{len(group_a.samples)} samples against {len(group_b.samples)}"
    return ""


def _of_sample(sample_a: Sample, sample_b: Sample) -> str:
    samples = sample_a, sample_b
    place = _first_other(sample_a.token_ids, sample_b.token_ids)
    if place is not None:
        ids = [
            str(sample.token_ids[place]) if place < len(sample.token_ids) else "the end" for sample in samples
        ]
        return f"token {place}: {ids[0]} against {ids[1]} (texts {sample_a.text!r} and {sample_b.text!r})"
    place = _first_other(sample_a.logprobs, sample_b.logprobs)
    if place is not None:
        return f"token {place}: logprob {sample_a.logprobs[place]} against {sample_b.logprobs[place]}"
    if sample_a.reward != sample_b.reward:
        return f"reward {sample_a.reward} against {sample_b.reward}, for the same text {sample_a.text!r}"
    return ""


def _first_other(array_a: NDArray[Any], array_b: NDArray[Any]) -> int | None:
    """Return the first place at which two arrays differ, bit by bit; None: nowhere."""
    size = min(array_a.size, array_b.size)
    bits = np.dtype(f"V{array_a.itemsize}")
    places = np.flatnonzero(array_a[:size].view(bits) != array_b[:size].view(bits))
    if places.size:
        return int(places[0])
    return None if array_a.size == array_b.size else size


def training_parting(iteration: int, first: RunDir, second: RunDir) -> Iterator[FirstDifference]:
    """Yield how two runs' batches of an iteration differ, then how the weights do; nothing if these are
    equal.
    """
    directories = first.checkpoint(iteration), second.checkpoint(iteration)
    result_a, result_b = map(published.read_result, directories)
    if result_a.policy == result_b.policy:
        return
    if result_a.batch_sha256 != result_b.batch_sha256 and not _same_sequences(iteration, first, second):
        batches = f"{result_a.batch_sha256[:12]} against {result_b.batch_sha256[:12]}"
        yield FirstDifference(iteration, Phase.TRAIN_DATA, f"the batches differ: {batches}")
    names = filter(is_part_of_model, result_a.files.keys() | result_b.files.keys())
    for name in sorted(names, key=lambda name: (not name.endswith(".safetensors"), name)):  # weights first
        if result_a.files.get(name) != result_b.files.get(name):
            text = _of_file(name, *(directory / name for directory in directories))
            yield FirstDifference(iteration, Phase.TRAINING, text)


def _same_sequences(iteration: int, first: RunDir, second: RunDir) -> bool:
    """Return whether two batches differ in the digest of their manifests alone, by which nodes made what."""
    try:
        batch_a, batch_b = (
            Batch.decode(files.read(run_dir.batch(iteration) / "batch.safetensors"))
            for run_dir in (first, second)
        )
    except (FileNotFoundError, DamagedBatch):
        return False
    return replace(batch_a, manifest_sha256=batch_b.manifest_sha256).encode() == batch_b.encode()


def _of_file(file: str, path_a: Path, path_b: Path) -> str:
    if not file.endswith(".safetensors") or not (files.exists(path_a) and files.exists(path_b)):
        return f"{file} differs"
    tensors_a, tensors_b = _tensors(path_a), _tensors(path_b)
    names = [
        name
        for name in sorted(tensors_a.keys() | tensors_b.keys())
        if tensors_a.get(name) != tensors_b.get(name)
    ]
    return f"{len(names)} of {len(tensors_a)} tensors of {file} differ, the first is {', '.join(names[:1])}"


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
    settings_a, settings_b = dict(flatten(first.settings)), dict(flatten(second.settings))
    for key in sorted(settings_a.keys() | settings_b.keys()):
        if settings_a.get(key) != settings_b.get(key):
            values = (show(settings.get(key)) or "empty" for settings in (settings_a, settings_b))
            yield f"setting {option_name(key)}: {' against '.join(values)}"
    for key in sorted(first.inputs.keys() & second.inputs.keys()):
        input_a, input_b = first.inputs[key], second.inputs[key]
        if input_a.name == input_b.name and input_a.digest != input_b.digest:
            digests = f"digest {input_a.digest} against {input_b.digest}"
            yield f"code or content of {option_name(key)} {input_a.name}: {digests}"
