"""The devices of a run, as its machines have said on disk: the placement, and how many each has.

    protocol/placement.json             by the master's machine at each start: {"num_nodes": 3, "place":
                                        ["rollout=0-1", "train=2"]}; missing, or nothing in `place`: one crew
    protocol/devices/rank_0001.json     by each machine, once: {"host": "node-b", "devices": 4}

Device numbers stay those of the first start: a machine that is away shifts nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings.placement import Crew, Crews, crews_of, parse_place
from coordinator.settings.tree import SettingsError
from rollout.storage import files, once

_DEVICES = re.compile(r"rank_(\d{4,})\.json", re.ASCII)


class Placement(NamedTuple):
    """What the master's machine has published last."""

    num_nodes: int
    """Machines of the run."""
    place: tuple[str, ...]
    """The values of --place; none: one crew of all devices."""

    def to_json(self) -> str:
        """Write it as it is published, and as a machine says to its nodes what it starts them for."""
        return json.dumps(self._asdict())


ONE_CREW = Placement(0, ())
"""What holds before anything is published."""


def read_placement(root: Path) -> Placement:
    """Return the placement of the run at `root`. Its directory need not be there yet."""
    path = _placement(root)
    if not files.is_directory(root) or path.name not in published.names(path.parent):
        return ONE_CREW
    document = published.read_json(path)
    return Placement(document["num_nodes"], tuple(document["place"])) if document else ONE_CREW


def publish_placement(root: Path, placement: Placement) -> None:
    """Publish the placement that this start goes by, unless it is the one that holds."""
    if read_placement(root) != placement and (placement.place or read_placement(root).place):
        files.make_directory(_placement(root).parent)
        files.publish(_placement(root), placement.to_json().encode())


def publish_devices(root: Path, machine: int, host: str, count: int) -> None:
    """Say how many devices a machine has; SettingsError if it had more when it said so first."""
    path = _devices(root) / f"rank_{machine:04d}.json"
    files.make_directory(path.parent)
    if once.create_once(path, json.dumps({"host": host, "devices": count}).encode()):
        return
    document = published.read_json(path) or {"devices": count}
    if document["devices"] > count:
        raise SettingsError(
            f"rank {machine} ({host}) has {count} devices, but had {document['devices']} when the run began, "
            "and devices keep their numbers; look at nvidia-smi and CUDA_VISIBLE_DEVICES there, or start over"
        )


def device_counts(root: Path) -> dict[int, int]:
    """Return how many devices each machine has, of those that have said it."""
    counts: dict[int, int] = {}
    directory = _devices(root)
    for name in published.names(directory):
        if (match := _DEVICES.fullmatch(name)) and (document := published.read_json(directory / name)):
            counts[int(match[1])] = document["devices"]
    return counts


def check(root: Path, placement: Placement, unpublished: Mapping[int, int]) -> None:
    """Raise SettingsError for devices that are not there, if all machines are known.

    `unpublished`: devices of machines that have not said so yet.
    """
    _crews_of(placement, {**unpublished, **device_counts(root)})


def placed_crews(root: Path, placement: Placement) -> Crews | None:
    """Return the crews of a placement; None while a machine has not said what it has.

    SettingsError for devices that are not there.
    """
    return _crews_of(placement, device_counts(root)) if placement.place else None


def _crews_of(placement: Placement, counts: Mapping[int, int]) -> Crews | None:
    if not placement.place or not counts.keys() >= set(range(placement.num_nodes)):
        return None
    try:
        return crews_of(parse_place(placement.place), [counts[rank] for rank in range(placement.num_nodes)])
    except ValueError as error:
        raise SettingsError(str(error)) from None


def run_dirs(root: Path, placement: Placement | None = None) -> Sequence[RunDir]:
    """Return the run directory as each crew sees it; a single one where nothing is placed. The first one
    leads: it has the first device of the master's machine.

    `placement`: one that was read before; None: the one that holds now.
    """
    crews = placed_crews(root, placement or read_placement(root))
    if crews is None:
        return [RunDir(root)]
    in_order = sorted(crews, key=lambda crew: (crews[crew][0].machine, crews[crew][0].devices))
    return [RunDir(root, crew, tuple(place.machine for place in crews[crew])) for crew in in_order]


def run_dir(root: Path, crew: Crew, placement: Placement | None = None) -> RunDir:
    """Return the run directory as `crew` sees it. SettingsError if the placement has no such crew."""
    by_crew = {candidate.crew: candidate for candidate in run_dirs(root, placement)}
    if crew not in by_crew:
        raise SettingsError(f"--crew {crew}: {root} has no such crew now; leave it out")
    return by_crew[crew]


def _placement(root: Path) -> Path:
    return root / "protocol" / "placement.json"


def _devices(root: Path) -> Path:
    return root / "protocol" / "devices"
