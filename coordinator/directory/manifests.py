"""Make the manifest over the parts of an iteration, and read the groups that it names; groups.jsonl beside it
holds them for people.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.directory.decoded_parts import Decode
from coordinator.directory.layout import GROUPS
from coordinator.directory.parts import Part, first_finished, read_parts
from coordinator.directory.published import Incomplete, names, read_json
from rollout.origin import Origin, origin_document
from rollout.part_file import DamagedPart, decode_part
from rollout.quota import Quota
from rollout.storage import files, once
from rollout.trajectory import Group, generated_tokens, line_for_people

log = logging.getLogger(__name__)


def manifest(
    directory: Path,
    iteration: int,
    quota: Quota,
    origin: Origin,
    named: Mapping[str, str] | None = None,
    short: int | None = 0,
) -> tuple[dict[str, Any], list[Group]]:
    """Return the manifest of an iteration, and its groups by slot, without those that are `unfinished` and
    count only as `generated` tokens. It takes the needed groups that come first
    by (epoch, rank, part). Its `origin` has the code of its first part; `mixed_code` counts the groups that
    were made or scored by other code.

    `named` holds the checksums of the parts that nodes have named; a listing may still lack these parts.
    `short` is how many needed groups the nodes could not make; Incomplete if more are missing. With None any
    number may be missing, and damaged parts stay where they are.
    """
    entries: list[dict[str, Any]] = []
    groups: list[Group] = []
    first: Part | None = None
    mixed = 0
    missing = quota.needed
    for part, finished in first_finished(read_parts(directory, origin, named, set_aside=short is not None)):
        part_groups: list[Group] = []
        for group in finished:
            counts = quota.counts(group)
            # Of those that count no more than are needed: a spare one that came late would enlarge the batch.
            if group.slot < quota.slots and (missing or not counts):
                missing -= counts
                part_groups.append(group)
        if part_groups:
            first = first or part
            mixed += sum(part.code != first.code and group.given_up is None for group in part_groups)
            entries.append(part.entry([group.slot for group in part_groups]))
            groups += part_groups
    if short is not None and missing > short:
        unfinished = sorted(set(range(quota.slots)) - {group.slot for group in groups})
        raise Incomplete(
            f"{directory}: {missing - short} groups are not finished, e.g. of slots {unfinished[:5]}"
        )
    unfinished = sorted(group.slot for group in groups if group.is_unfinished)
    generated = sum(generated_tokens(group, iteration) for group in groups)
    groups = [group for group in groups if not group.is_unfinished]
    given_up = [{"slot": group.slot, "reason": group.given_up} for group in groups if group.given_up]
    document = {
        "iteration": iteration,
        "slots": quota.needed,
        "groups": len(groups) - len(given_up),
        "samples": sum(len(group.samples) for group in groups),
        "policy": origin.policy,
        "origin": origin_document(first.origin if first else origin),
        "parts": entries,
        "mixed_code": mixed,
        "given_up": sorted(given_up, key=lambda entry: entry["slot"]),
        "unfinished": unfinished,
        "generated": generated,
        "short": missing,
        "failed_samples": sum(len(group.failed) for group in groups),
        "rewards": {str(group.slot): mean for group in groups if (mean := mean_reward(group)) is not None},
        **figures(groups),
    }
    return document, _by_slot(groups)


def mean_reward(group: Group) -> float | None:
    """Return the mean reward of a group's samples; None if none has one."""
    rewards = _rewards(group)
    return round(sum(rewards) / len(rewards), 6) if rewards else None


def figures(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the figures of the samples for the metrics line.

    `flat_groups`: the fraction of groups, of those with at least two rewards, whose rewards are all equal.
    `metrics`: the mean of each metric over the samples that have it.
    """
    samples = [sample for group in groups for sample in group.samples]
    several = [rewards for group in groups if len(rewards := _rewards(group)) > 1]
    metrics: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metrics.items():
            metrics.setdefault(name, []).append(value)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    cut = sum(sample.finish_reason == "length" for sample in samples)
    return {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "truncated": cut / len(samples) if samples else None,
        "tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "flat_groups": sum(len(set(rewards)) == 1 for rewards in several) / len(several) if several else None,
        "metrics": {name: sum(values) / len(values) for name, values in sorted(metrics.items())},
    }


def _rewards(group: Group) -> list[float]:
    return [sample.reward for sample in group.samples if sample.reward is not None]


def read_groups(
    directory: Path,
    manifest: Mapping[str, Any],
    decode: Decode = lambda data, _sha256: decode_part(data),
) -> list[Group]:
    """Read the groups that a manifest names, by slot, without the unfinished ones. Raises Incomplete if a
    part is missing or altered.
    """
    groups: list[Group] = []
    for entry in manifest["parts"]:
        path = directory / entry["file"]
        try:
            data = files.read(path)
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise Incomplete(f"{path} differs from the manifest's checksum")
            _header, part_groups = decode(data, entry["sha256"])
        except (FileNotFoundError, DamagedPart) as error:
            raise Incomplete(f"{path}: {error}") from None
        slots = set(entry["slots"])
        groups += [group for group in part_groups if group.slot in slots and not group.is_unfinished]
    return _by_slot(groups)


def _by_slot(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.slot)


def publish_manifest(path: Path, document: Mapping[str, Any], groups: Iterable[Group]) -> None:
    """Create the manifest, then groups.jsonl beside it. A manifest that is already there is adopted."""
    if once.create_once(path, json.dumps(document).encode()):
        _publish_for_people(path.with_name(GROUPS), document, groups)


def ensure_readable(path: Path) -> None:
    """Write groups.jsonl beside a manifest that has none, since its maker has ended in between.

    Its content follows from the manifest alone. It is for people: without a part it is left out.
    """
    listed = names(path.parent)
    if path.name not in listed or GROUPS in listed or (document := read_json(path)) is None:
        return
    try:
        _publish_for_people(path.with_name(GROUPS), document, read_groups(path.parent, document))
    except Incomplete as error:
        log.warning("%s is not written: %s", path.with_name(GROUPS), error)


def _publish_for_people(path: Path, document: Mapping[str, Any], groups: Iterable[Group]) -> None:
    rank_of = {slot: part["rank"] for part in document["parts"] for slot in part["slots"]}
    policy = document["policy"]
    lines = [line_for_people(group, rank=rank_of[group.slot], model_version=policy) for group in groups]
    files.publish(path, "".join(lines).encode(), durable=False)
