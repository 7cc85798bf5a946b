"""Write finished groups as part files, read them back, and publish the manifest over them with groups.jsonl,
which holds its groups for people.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.directory.decoded_parts import Decode, decoded
from coordinator.directory.layout import GROUPS, Kind, PartName, RunDir, parse_part_name
from coordinator.directory.published import Incomplete, names, read_json
from rollout.origin import Origin, described
from rollout.part_file import DamagedPart, PartHeader, check_part, decode_part, encode_part
from rollout.quota import Quota
from rollout.storage import files, once
from rollout.trajectory import Group, generated_tokens, line_for_people

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """A part that was just written."""

    name: str
    sha256: str
    groups: list[Group]


class PartWriter:
    """Writes the finished groups of one share as immutable parts, numbered within an epoch.

    Groups may be added, and another flush may begin, while a thread writes.
    """

    def __init__(
        self,
        run_dir: RunDir,
        kind: Kind,
        iteration: int,
        rank: int,
        epoch: int,
        origin: Origin,
        first: int = 0,
    ) -> None:
        """The parts are numbered from the one behind `first`."""
        self._directory = run_dir.trajectories(kind, iteration)
        self._header = PartHeader(kind, iteration, rank, epoch, first, **vars(origin))
        self._waiting: list[Group] = []
        self._writing = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        """Whether a group waits to be written."""
        return bool(self._waiting)

    def add(self, group: Group) -> None:
        """Take a finished group."""
        self._waiting.append(group)

    def flush(self) -> Written | None:
        """Write the waiting groups as a part; returns None if there are none."""
        with self._writing:
            groups = list(self._waiting)
            if not groups:
                return None
            header = self._header = replace(self._header, part=self._header.part + 1)
            name = PartName(header.epoch, header.rank, header.part).name
            data = encode_part(groups, header)
            files.publish(self._directory / name, data)
            del self._waiting[: len(groups)]  # only now, so that a failed flush can be repeated
            return Written(name, hashlib.sha256(data).hexdigest(), groups)


@dataclass(frozen=True)
class Part:
    """A part that was read: verified, and of the wanted origin."""

    name: PartName
    bytes: int
    sha256: str
    origin: Origin
    groups: list[Group]

    def entry(self, slots: Collection[int]) -> dict[str, Any]:
        """Return the part's entry in a manifest that takes `slots` from it."""
        return {
            "file": self.name.name,
            "rank": self.name.rank,
            "epoch": self.name.epoch,
            "slots": sorted(slots),
            "bytes": self.bytes,
            "sha256": self.sha256,
            **self.code,
        }

    @property
    def code(self) -> dict[str, str]:
        """The digests of the code that made and scored its groups."""
        return {
            "reward_digest": self.origin.reward.digest,
            "environment_digest": self.origin.environment.digest,
        }


def read_parts(
    directory: Path,
    origin: Origin,
    named: Mapping[str, str] | None = None,
    rank: int | None = None,
    set_aside: bool = True,
    decode: Decode = decoded,
) -> Iterator[Part]:
    """Read the parts of `origin` (maybe with other code), by (epoch, rank, part). A damaged part is logged,
    and set aside unless `set_aside` is False. `rank`: read the parts of this rank only. `named`: the parts
    that nodes have named, with checksums.
    """
    named = named or {}
    for name in sorted(filter(None, map(parse_part_name, {*names(directory), *named}))):
        if rank not in {None, name.rank}:
            continue
        path = directory / name.name
        try:
            data = files.read(path)
        except FileNotFoundError:
            if name.name not in named:  # another node has just set it aside
                continue
            raise Incomplete(f"{path} was named by its node, but is not there") from None
        try:
            if named.get(name.name, sha256 := hashlib.sha256(data).hexdigest()) != sha256:
                raise DamagedPart("it differs from what its node has named")
            header, groups = decode(data, sha256)
        except DamagedPart as error:
            if not set_aside:
                log.warning("%s is damaged: left out: %s", path, error)
                continue
            log.warning("%s is damaged and set aside; its groups are generated again: %s", path, error)
            files.rename(path, path.with_suffix(".damaged"))
            continue
        if difference := origin.difference(header.origin):
            log.warning("%s was made with %s: left out", path, difference)
            continue
        yield Part(name, len(data), sha256, header.origin, groups)


def names_of(directory: Path, origin: Origin, rank: int) -> dict[str, str]:
    """Return name -> sha256 of the parts of `origin` that `rank` has written, whose checksums hold."""
    parts = read_parts(directory, origin, rank=rank, decode=lambda data, _sha256: (check_part(data), []))
    return {part.name.name: part.sha256 for part in parts}


def first_finished(parts: Iterable[Part]) -> Iterator[tuple[Part, list[Group]]]:
    """Each part with its groups whose slot is in no earlier part; a tombstone only if no part has its slot
    finished, and no later one has it.
    """
    parts = list(parts)
    finished = {group.slot for part in parts for group in part.groups if group.given_up is None}
    last_with = {group.slot: part for part in parts for group in part.groups if group.given_up is not None}
    taken: set[int] = set()
    for part in parts:
        groups = [
            group
            for group in part.groups
            if (group.slot not in taken if group.given_up is None else last_with[group.slot] is part)
            and (group.given_up is None or group.slot not in finished)
        ]
        taken.update(group.slot for group in groups)
        yield part, groups


def finished_groups(directory: Path, origin: Origin, started_after: int = 0) -> dict[int, Group]:
    """Return the finished groups of this origin, by slot, and the tombstones of epochs after
    `started_after`: what was given up before is made again.
    """
    return {
        group.slot: group
        for part, groups in first_finished(read_parts(directory, origin))
        for group in groups
        if group.given_up is None or part.name.epoch > started_after
    }


def has_finished(groups: Iterable[Group]) -> bool:
    """Return whether not all of these groups were given up."""
    return any(group.given_up is None for group in groups)


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
        taken: list[Group] = []
        for group in finished:
            counts = quota.counts(group)
            # Of those that count no more than are needed: a spare one that came late would enlarge the batch.
            if group.slot < quota.slots and (missing or not counts):
                missing -= counts
                taken.append(group)
        if taken:
            first = first or part
            mixed += sum(part.code != first.code and group.given_up is None for group in taken)
            entries.append(part.entry([group.slot for group in taken]))
            groups += taken
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
        "origin": described(first.origin if first else origin),
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
