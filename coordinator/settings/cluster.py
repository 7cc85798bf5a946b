"""Settings of the nodes: how many there are, what each does, and how long they wait for each other."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from coordinator.settings.node_groups import Groups, GroupSettings, refuse_misfits
from coordinator.settings.placement import parse_place
from rollout.settings_tree import Mark, Settings, nested

BEATS_PER_S = 50.0
"""How many heartbeats a second all nodes together write, unless they must beat more often to be believed."""
LISTINGS_PER_S = 1000.0
"""How many listings a second all nodes together make while they wait for long."""


def parse_weights(text: str) -> list[float]:
    """Parse `2,1,1`; ValueError for an item that is not a positive number."""
    weights: list[float] = []
    for item in text.split(","):
        try:
            weights.append(float(item))
        except ValueError:
            raise ValueError(
                f"--rank-weights {text}: '{item}' is not a number; give one per node, e.g. 2,1,1"
            ) from None
        if not 0 < weights[-1] < float("inf"):
            raise ValueError(
                f"--rank-weights {text}: '{item}' is not positive; a node without work is left out"
            )
    return weights


def _weights(value: Any) -> Any:
    return parse_weights(value) if isinstance(value, str) else value


def _gpus(value: Any) -> Any:
    """Parse `32` or `8,4,4` into a list of numbers."""
    if isinstance(value, int):
        return [value]
    if not isinstance(value, str):
        return value
    items = [item.strip() for item in value.split(",")]
    for item in items:
        if not item.isdecimal():
            raise ValueError(
                f"--expect-gpus {value}: '{item}' is not a number of GPUs; give the total, e.g. 32, or one "
                "number per node, e.g. 8,8,4"
            )
    return [int(item) for item in items]


def _texts(value: Any) -> Any:
    return value.split() if isinstance(value, str) else value


class ClusterSettings(Settings):
    """The nodes, and how long they wait for each other."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Number of nodes, including the master."""
    rank_weights: Annotated[tuple[float, ...] | None, BeforeValidator(_weights)] = None
    """One positive number per node: its share of the tasks and of the training tokens. Default: each node
    takes new tasks when it is free (`rollout.claims`), and trains in proportion to its GPUs.
    """
    expect_gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_gpus)] = None
    """GPUs that must be present before work starts: the total of all nodes, or one number per node."""
    place: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """Devices that only generate and devices that only train, at the same time, e.g. rollout=0-5 and
    train=6,7. A device is a GPU, or a node without GPUs. Default: all do both, in turns.
    """
    beat_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two heartbeats of a node; longer with more than a hundred nodes."""
    node_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A node counts as lost when its heartbeat has not changed for this long."""
    rejoin_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long nodes wait for other nodes to start, or to come back."""
    poll_max_s: Annotated[float, Field(gt=0)] = 0.5
    """Longest pause between two listings while a node waits; with hundreds of nodes it is longer."""
    local_dir: Annotated[str | None, Mark.PER_MACHINE] = None
    """A directory on the node's own disk, for copies of models that are on a shared one; default: $TMPDIR."""
    max_async_level: Annotated[int, Field(ge=0)] = 0
    """How many iterations the samples lag, with two crews (`place`): iteration i is sampled by the policy of
    iteration max(0, i - 1 - max_async_level); 0: always by the newest."""
    on_node_failure: Literal["wait", "shrink", "abort"] = "wait"
    """When a node is lost: wait until it is back, continue with the others (shrink), or stop (exit code 3).
    """
    groups: Annotated[Groups, BeforeValidator(partial(nested, "cluster.groups"))] = Field(default={})
    """Nodes that differ from the others, by a name of your own: see `cluster.groups.NAME`."""

    @property
    def beat_interval_s(self) -> float:
        """Seconds between two heartbeats: beat_s, or more where many nodes share the directory."""
        return max(self.beat_s, min(self.num_nodes / BEATS_PER_S, self.node_timeout_s / 4))

    @property
    def pause_bounds_s(self) -> tuple[float, float]:
        """Shortest and longest pause between two listings: poll_max_s at most, or more for many nodes."""
        least_s = max(0.001, self.num_nodes / LISTINGS_PER_S / 10)
        return least_s, max(self.poll_max_s, self.num_nodes / LISTINGS_PER_S)

    @model_validator(mode="after")
    def _weights_fit(self) -> "ClusterSettings":
        weights = self.rank_weights
        if weights is None:
            return self
        text = ",".join(f"{weight:g}" for weight in weights)
        if len(weights) != self.num_nodes:
            example = ",".join("2" if rank == 0 else "1" for rank in range(self.num_nodes))
            raise ValueError(
                f"--rank-weights {text} has {len(weights)} weight{'s'[: len(weights) > 1]} for --num-nodes "
                f"{self.num_nodes}; give --num-nodes {len(weights)}, or one weight per node, e.g. {example}"
            )
        if not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"--rank-weights {text}: every weight must be a positive number")
        return self

    @model_validator(mode="after")
    def _expected_gpus_fit(self) -> "ClusterSettings":
        numbers = self.expect_gpus
        if numbers is not None and len(numbers) not in {1, self.num_nodes}:
            text = ",".join(str(number) for number in numbers)
            raise ValueError(
                f"--expect-gpus {text} has {len(numbers)} numbers for --num-nodes {self.num_nodes}; give the "
                f"total, e.g. {8 * self.num_nodes}, or one per node, e.g. {','.join(['8'] * self.num_nodes)}"
            )
        return self

    @model_validator(mode="after")
    def _place_fits(self) -> "ClusterSettings":
        if self.place:
            parse_place(self.place)
            if self.expect_gpus is not None:
                raise ValueError(
                    "--expect-gpus beside --place, which names the devices that must be there; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> "ClusterSettings":
        refuse_misfits(self.groups)
        return self

    @model_validator(mode="after")
    def _timeout_fits(self) -> "ClusterSettings":
        if self.node_timeout_s <= 2 * self.beat_s:
            raise ValueError(
                f"--node-timeout {self.node_timeout_s:g} must be more than two beats "
                f"(cluster.beat_s={self.beat_s:g})"
            )
        return self

    def weight(self, rank: int) -> float:
        """Return the weight of `rank`, 1 if no weights are set."""
        return self.rank_weights[rank] if self.rank_weights else 1.0

    def group_of(self, machine: int) -> GroupSettings | None:
        """Return the group that a machine is in, by its number in --worker; None: in none."""
        return next((group for group in self.groups.values() if machine in group.ranks), None)
