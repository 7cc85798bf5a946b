"""The devices that generate and those that train (cluster.place), and the crews that this makes. Pure.

A device is a GPU; a machine without GPUs counts as one. Devices are numbered through the machines, in rank
order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.settings.number_ranges import parse_ranges

Crew = Literal["main", "rollout", "train"]
"""The nodes that go through phases together: through all 14, or those that generate, and those that train."""
CREWS: tuple[Crew, ...] = ("main", "rollout", "train")

HALVES: tuple[Crew, Crew] = ("rollout", "train")


def parse_place(texts: Sequence[str]) -> dict[Crew, frozenset[int]]:
    """Parse `rollout=0-3,8` and `train=4-7` into sets of device numbers; ranges are inclusive.

    ValueError for another name, a missing or repeated one, what is no range, and sets that overlap but are
    not equal.
    """
    place: dict[Crew, frozenset[int]] = {}
    for text in texts:
        name, _, ranges = text.partition("=")
        crew: Crew | None = next((crew for crew in HALVES if crew == name.strip()), None)
        if crew is None or not ranges.strip() or crew in place:
            raise ValueError(
                f"--place {text}: give --place rollout=DEVICES and --place train=DEVICES once each, e.g. "
                "--place rollout=0-5 --place train=6,7"
            )
        place[crew] = frozenset(_devices(text, ranges))
    if missing := [crew for crew in HALVES if crew not in place]:
        raise ValueError(f"--place {' --place '.join(texts)}: add --place {missing[0]}=DEVICES")
    shared = place["rollout"] & place["train"]
    if shared and place["rollout"] != place["train"]:
        raise ValueError(
            f"--place: {_text(shared)} would generate and train, but others do one of them; let the two have "
            "the same devices, or none in common"
        )
    return place


def _devices(text: str, ranges: str) -> list[int]:
    try:
        return parse_ranges(ranges, "devices")
    except ValueError as error:
        raise ValueError(f"--place {text}: {error}") from None


def _text(devices: frozenset[int]) -> str:
    several = len(devices) > 1
    return f"device{'s' if several else ''} {', '.join(map(str, sorted(devices)))}"


@dataclass(frozen=True)
class Place:
    """A machine in a crew."""

    machine: int
    devices: tuple[int, ...]
    """Its own devices that the crew has, counted from 0 on that machine."""


Crews = dict[Crew, tuple[Place, ...]]
"""The machines of each crew in order: a machine's place here is its rank in the crew."""


def crews_of(place: Mapping[Crew, frozenset[int]] | None, device_counts: Sequence[int]) -> Crews:
    """Return the crews; a single one, `main`, if nothing is placed or both halves have the same devices.

    `device_counts`: the devices of each machine, by rank. ValueError for a device that is not there.
    """
    total = sum(device_counts)
    if place is None or place["rollout"] == place["train"]:
        devices_by_crew: dict[Crew, frozenset[int]] = {
            "main": place["train"] if place else frozenset(range(total))
        }
    else:
        devices_by_crew = dict(place)
    if unknown := frozenset[int]().union(*devices_by_crew.values()) - frozenset(range(total)):
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(device_counts))
        raise ValueError(
            f"--place: there is no {_text(unknown)}; the machines have {total} devices ({counts}), numbered "
            f"from 0 to {total - 1}"
        )
    crews: Crews = {crew: _places(devices, device_counts) for crew, devices in devices_by_crew.items()}
    working = {place.machine for places in crews.values() for place in places}
    if idle := sorted(set(range(len(device_counts))) - working):
        raise ValueError(
            f"--place: no device of rank {idle[0]} generates or trains; place one of its devices, or leave "
            "that machine out of --num-nodes"
        )
    return crews


def _places(devices: frozenset[int], device_counts: Sequence[int]) -> tuple[Place, ...]:
    places: list[Place] = []
    first = 0
    for machine, count in enumerate(device_counts):
        local_devices = tuple(device - first for device in range(first, first + count) if device in devices)
        places += [Place(machine, local_devices)] if local_devices else []
        first += count
    return tuple(places)
