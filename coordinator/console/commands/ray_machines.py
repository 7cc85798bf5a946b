"""The machines that are asked of a Ray cluster, and what it lacks; nothing here needs Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.settings.tree import SettingsError

Bundle = dict[str, float]
"""What a node asks of its machine: CPU and GPU, as Ray counts them."""


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster, with all that it has, whoever uses it now."""

    host: str
    gpus: float
    cpus: float

    def __str__(self) -> str:
        return f"{self.host} ({self.gpus:g} GPUs, {self.cpus:g} CPUs)"


@dataclass(frozen=True)
class NodeResources:
    """What each node asks for, in order of rank; None: all that its machine has."""

    gpus: Sequence[float | None]
    cpus: Sequence[float | None]


def parse_asked(nodes: int, gpus: str | None, cpus: str | None) -> NodeResources:
    """Read --gpus-per-node and --cpus-per-node: one number, or one for each node; SettingsError."""
    return NodeResources(
        _numbers("--gpus-per-node", gpus, nodes, 0), _numbers("--cpus-per-node", cpus, nodes, 1)
    )


def _numbers(option: str, text: str | None, nodes: int, least: int) -> list[float | None]:
    if text is None:
        return [None] * nodes
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words) or len(words) not in {1, nodes}:
        raise SettingsError(
            f"{option} {text}: give a number from {least}, or one for each of {nodes} nodes, e.g. 8,8,4"
        )
    return [float(word) for word in words] * (nodes // len(words))


def bundles(machines: Sequence[Machine], demand: NodeResources, address: str) -> list[Bundle]:
    """Return the Bundle to ask for each node; SettingsError names what the cluster lacks, by host.

    A node that asks for all gets the largest machine that is left, the others the smallest that is enough.
    """
    nodes = len(demand.gpus)
    usable = sorted((m for m in machines if m.cpus), key=lambda machine: (machine.gpus, machine.cpus))
    listing = ", ".join(map(str, machines)) or "none"
    if len(usable) < nodes:
        raise SettingsError(
            f"--num-nodes {nodes}: the Ray cluster at {address} has {len(usable)} machines with CPUs: "
            f"{listing}; start Ray on {nodes - len(usable)} more, or give a smaller number"
        )
    by_rank: dict[int, Bundle] = {}
    needs = list(zip(demand.gpus, demand.cpus, strict=True))
    # those that ask for a number first, the most first
    for rank in sorted(range(nodes), key=lambda rank: tuple(-(number or 0.0) for number in needs[rank])):
        gpus, cpus = needs[rank]
        fits = [m for m in usable if m.gpus >= (gpus or 0) and m.cpus >= (cpus or 0)]
        if not fits:
            ask = f"{gpus or 0:g} GPUs and {cpus or 0:g} CPUs"
            raise SettingsError(
                f"rank {rank} asks for {ask}, and no machine of the Ray cluster at {address} has them left; "
                f"there are: {listing}"
            )
        machine = fits[-1] if gpus is None and cpus is None else fits[0]
        usable.remove(machine)
        numbers = {"GPU": machine.gpus if gpus is None else gpus, "CPU": cpus or machine.cpus}
        by_rank[rank] = {name: number for name, number in numbers.items() if number}
    return [by_rank[rank] for rank in range(nodes)]
