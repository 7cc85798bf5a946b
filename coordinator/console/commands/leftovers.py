"""Find what an interrupted iteration left in a run directory, from names alone: `plan`."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from coordinator.directory import published
from coordinator.directory.file_names import (
    Beat,
    Flag,
    Record,
    parse_claim_name,
    parse_iteration_name,
    parse_part_name,
    parse_protocol_name,
    parse_staging_name,
    parse_state_name,
)
from coordinator.directory.layout import GROUPS, REMOVED, ROLLOUT_TIMES, RunDir
from coordinator.protocol.snapshot import Board, parse
from rollout.storage import files


def last_begun(run_dir: RunDir) -> int | None:
    """Return the last iteration that a run has begun; None before the first."""
    names = published.names(run_dir.iteration_json(1).parent.parent)
    numbers = [number for name in names if (number := parse_iteration_name(name)) is not None]
    return max(numbers, default=None)


class LeftoverKind(StrEnum):
    """What a leftover is. Within a directory they are removed in this order."""

    FLAG = "flag of the iteration"
    ENDED = "flag of an ended epoch"
    CLAIM = "claim of an ended epoch"
    BEAT = "heartbeat before the newest"
    TEMPORARY = "temporary"
    STAGING = "unpublished checkpoint"
    STATE = "trainer state"
    BATCH = "batch"
    MANIFEST = "manifest"
    GROUPS = "groups of the manifest, for people"
    TIMES = "times of the rollout"
    PART = "part"
    OPENING = "opening of the iteration"


BY_THE_WAY = {LeftoverKind.ENDED, LeftoverKind.CLAIM, LeftoverKind.BEAT, LeftoverKind.TEMPORARY}
"""Leftovers that are removed too, but may belong to other iterations."""


class Leftover(NamedTuple):
    """A file or directory to remove."""

    path: Path
    kind: LeftoverKind


class Plan(NamedTuple):
    """What to remove, in order; and the unknown files in the iteration's own directories, which stay."""

    leftovers: list[Leftover]
    unknown: list[Path]

    def has_nothing(self) -> bool:
        """Return whether the iteration itself has left nothing."""
        return all(leftover.kind in BY_THE_WAY for leftover in self.leftovers)


def look(crews: Sequence[RunDir], iteration: int) -> dict[Path, list[str]]:
    """List the directories where an iteration leaves something, in the order of removal. `crews`: the run
    directory as each crew sees it.
    """
    run_dir = crews[0]
    directories = (
        *(directory for crew in crews for directory in (*crew.protocol, crew.claims)),
        run_dir.images,
        run_dir.checkpoints,
        run_dir.trainer_states,
        run_dir.batch(iteration),
        run_dir.trajectories("eval", iteration),
        run_dir.trajectories("train", iteration),
    )
    return {directory: published.names(directory) for directory in directories}


def plan(
    claimed: Mapping[RunDir, int],
    iteration: int,
    listed: Mapping[Path, Collection[str]],
    keep: Collection[Path] = (),
) -> Plan:
    """Plan the removal of what `iteration` left, as `listed` by `look`. Of each crew, epochs below `claimed`
    have ended.

    `keep`: files, and directories with all their files, that stay.
    """
    run_dir = next(iter(claimed))
    boards = {crew: parse(name for path in crew.protocol for name in listed[path]) for crew in claimed}
    crew_of = {directory: crew for crew in claimed for directory in (*crew.protocol, crew.claims)}
    leftovers: list[Leftover] = []
    unknown: list[Path] = []
    for directory, names in listed.items():
        leftovers_here: list[Leftover] = []
        for path in sorted(directory / name for name in names):
            if path in keep or directory in keep:
                continue
            if crew := crew_of.get(directory):
                kind = _in_protocol(path.name, iteration, claimed[crew], boards[crew])
            elif directory == run_dir.checkpoints:
                kind = _in_checkpoints(path.name, iteration)
            elif directory == run_dir.trainer_states:
                saved = parse_state_name(path.name.removeprefix(REMOVED))
                kind = LeftoverKind.STATE if saved and saved[0] == iteration else None
            elif directory == run_dir.images:
                kind = LeftoverKind.TEMPORARY if files.is_temporary(path.name) else None
            elif (kind := _in_own_directory(path.name)) is None:
                unknown.append(path)
            leftovers_here += [Leftover(path, kind)] if kind else []
        leftovers += sorted(leftovers_here, key=lambda leftover: list(LeftoverKind).index(leftover.kind))
    return Plan(leftovers, unknown)


def _in_protocol(name: str, iteration: int, claimed: int, board: Board) -> LeftoverKind | None:
    """Epoch records and the newest beat of each rank stay: they show which numbers were used."""
    if claim := parse_claim_name(files.published_name(name)):
        return LeftoverKind.CLAIM if claim.epoch < claimed else None
    if files.is_temporary(name):
        entry = parse_protocol_name(files.published_name(name))
        if isinstance(entry, Beat):  # of an older process, not of one that is just starting
            return (
                LeftoverKind.TEMPORARY if entry.incarnation <= board.highest_incarnation(entry.rank) else None
            )
        return LeftoverKind.TEMPORARY if isinstance(entry, Flag | Record) and entry.epoch < claimed else None
    entry = parse_protocol_name(name)
    if isinstance(entry, Flag) and entry.epoch < claimed:
        return LeftoverKind.FLAG if entry.iteration == iteration else LeftoverKind.ENDED
    return LeftoverKind.BEAT if isinstance(entry, Beat) and entry != board.beats[entry.rank] else None


def _in_checkpoints(name: str, iteration: int) -> LeftoverKind | None:
    """Find staging directories: as training made them, set aside, or half removed."""
    if files.is_temporary(name):
        return LeftoverKind.TEMPORARY
    if name.startswith(REMOVED):
        name = f".{name.removeprefix(REMOVED)}"
    staged = parse_staging_name(name.removesuffix(".damaged").removesuffix(".foreign"))
    return LeftoverKind.STAGING if staged and staged[0] == iteration else None


def _in_own_directory(name: str) -> LeftoverKind | None:
    """Find what nodes write into an iteration's batch and trajectories, also if it was set aside."""
    if files.is_temporary(name):
        return LeftoverKind.TEMPORARY
    if name in {"batch.json", "batch.safetensors", "trained.json"}:
        return LeftoverKind.BATCH
    if name in {"iteration.json", "iteration.unused"}:
        return LeftoverKind.OPENING
    if name.startswith("manifest."):
        return LeftoverKind.MANIFEST
    if name == GROUPS:
        return LeftoverKind.GROUPS
    if name == ROLLOUT_TIMES:
        return LeftoverKind.TIMES
    stem, _, suffix = name.rpartition(".")
    is_part = suffix in {"safetensors", "damaged"} and parse_part_name(f"{stem}.safetensors")
    return LeftoverKind.PART if is_part else None
