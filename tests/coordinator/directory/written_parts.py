"""Parts of a made-up iteration 3."""

from pathlib import Path
from typing import Any

from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter
from rollout.origin import Origin
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN


def writer(directory: Path, rank: int = 0, epoch: int = 2, origin: Origin = ORIGIN) -> PartWriter:
    return PartWriter(RunDir(directory.parents[1]), "train", 3, rank, epoch, origin)


def write(directory: Path, *groups: Group, rank: int = 0, epoch: int = 2, origin: Origin = ORIGIN) -> None:
    """One part with these groups."""
    made = writer(directory, rank, epoch, origin)
    for each in groups:
        made.add(each)
    made.flush()


def slots_of(document: dict[str, Any]) -> dict[str, list[int]]:
    return {part["file"]: part["slots"] for part in document["parts"]}


def rewards_of(groups: list[Group]) -> dict[int, list[float | None]]:
    return {each.slot: [sample.reward for sample in each.samples] for each in groups}
