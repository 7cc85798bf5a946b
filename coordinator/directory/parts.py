"""Write finished groups as part files, and read them back."""

import hashlib
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.directory.decoded_parts import Decode, decoded
from coordinator.directory.file_names import PartName, parse_part_name
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.published import Incomplete, names
from rollout.origin import Origin
from rollout.part_file import DamagedPart, PartHeader, check_part, encode_part
from rollout.storage import files
from rollout.trajectory import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenPart:
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
        """Write parts numbered from `first` + 1 on, so that they stand beside those of an earlier writer."""
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

    def flush(self) -> WrittenPart | None:
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
            return WrittenPart(name, hashlib.sha256(data).hexdigest(), groups)


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


def part_checksums_of(directory: Path, origin: Origin, rank: int) -> dict[str, str]:
    """Return name -> sha256 of the parts of `origin` that `rank` has written, whose checksums hold."""
    parts = read_parts(directory, origin, rank=rank, decode=lambda data, _sha256: (check_part(data), []))
    return {part.name.name: part.sha256 for part in parts}


def first_finished(parts: Iterable[Part]) -> Iterator[tuple[Part, list[Group]]]:
    """Yield each part with its groups that count. Of a slot's copies the first finished one counts; if none
    is finished, the last tombstone.
    """
    parts = list(parts)
    finished = {group.slot for part in parts for group in part.groups if group.given_up is None}
    last_with = {group.slot: part for part in parts for group in part.groups if group.given_up is not None}
    slots: set[int] = set()
    for part in parts:
        groups = [
            group
            for group in part.groups
            if (group.slot not in slots if group.given_up is None else last_with[group.slot] is part)
            and (group.given_up is None or group.slot not in finished)
        ]
        slots.update(group.slot for group in groups)
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
