"""Samples that one iteration has begun and the next one goes on with (rollout.segment_tokens).

The parts of an iteration hold a group for each of its slots. Those with unfinished samples count for no
batch, and the manifest lists them. The next iteration has slots for them before its new ones. So a group is
in flight in one iteration after the other, and is trained in the first in which all its samples have ended.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from rollout.part_file import DamagedPart, decode_part
from rollout.storage import files
from rollout.tally import amount
from rollout.trajectory import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BegunGroup:
    """A group that an iteration goes on with, as its iteration.json has it."""

    iteration: int
    slot: int
    """Slot of `iteration` in which the group was begun, counted among the new ones; its seed is of there."""
    file: str
    file_sha256: str
    file_slot: int
    """Slot that its samples so far have in `file`, a part of the iteration before."""

    @classmethod
    def all_of(cls, opened: Mapping[str, Any]) -> "list[BegunGroup]":
        """Return the groups that an iteration goes on with: those of its first slots, in order."""
        return [cls(**entry) for entry in opened.get("begun", ())]


def left_by(
    run_dir: RunDir, iteration: int, made_with: Mapping[str, Any]
) -> tuple[list[BegunGroup], list[int], list[int]]:
    """Return the groups that `iteration` has left unfinished for the next one, and their tasks; then those
    tasks to begin again, because the next one is `made_with` another sampling or environment.
    """
    manifest = published.read_manifest(run_dir, "train", iteration) or {}
    unfinished: list[int] = manifest.get("unfinished", [])
    opened = published.read_json(run_dir.iteration_json(iteration)) or {}
    if not unfinished or not opened:
        return [], [], []
    tasks = [opened["tasks"][slot] for slot in unfinished]
    was = manifest["origin"]
    if (was["sampling"], was["environment"]["name"]) != (
        made_with["sampling"],
        made_with["environment"]["name"],
    ):
        log.warning(
            "iteration %d: %s begun again: the sampling or the environment has changed since",
            iteration,
            amount(len(tasks), "groups", "are"),
        )
        return [], [], tasks
    before = BegunGroup.all_of(opened)
    part_of = {slot: part for part in manifest["parts"] for slot in part["slots"]}
    begun: list[BegunGroup] = []
    for slot in unfinished:
        first = (
            (before[slot].iteration, before[slot].slot)
            if slot < len(before)
            else (iteration, slot - len(before))
        )
        begun.append(BegunGroup(*first, part_of[slot]["file"], part_of[slot]["sha256"], slot))
    return begun, tasks, []


def read(
    run_dir: RunDir, iteration: int, begun: Sequence[BegunGroup], slots: Collection[int]
) -> dict[int, Group]:
    """Return, by slot of `iteration`, the groups that it goes on with in `slots`.

    A group whose part is gone or damaged is left out: its samples are begun again, with the same seeds.
    """
    by_slot: dict[int, Group] = {}
    directory = run_dir.trajectories("train", iteration - 1)
    begun_here = {slot: begun[slot] for slot in slots if slot < len(begun)}
    for name, sha256 in sorted({(sample.file, sample.file_sha256) for sample in begun_here.values()}):
        slot_of = {sample.file_slot: slot for slot, sample in begun_here.items() if sample.file == name}
        try:
            data = files.read(directory / name)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise DamagedPart("it differs from the manifest's checksum")
            _, groups = decode_part(data)
        except (FileNotFoundError, DamagedPart) as error:
            again = amount(len(slot_of), "groups", "are")
            log.error("%s: %s; of those in it %s begun again", directory / name, error, again)
            continue
        by_slot |= {slot_of[group.slot]: group for group in groups if group.slot in slot_of}
    return by_slot
