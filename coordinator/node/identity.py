"""The identity of a node: the facts that its parts share."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER, RunDir
from coordinator.machine import network
from coordinator.machine.gpus import count_gpus
from coordinator.settings.tree import RunSettings
from coordinator.start.inputs import Inputs, local_processes
from coordinator.start.start import Start


@dataclass
class Identity:
    """Facts about this node. Its settings change with each epoch, its addresses with its network."""

    rank: int
    run_dir: RunDir
    run_id: str
    inputs: Inputs
    overrides: Mapping[str, Any] | None
    """What this start and those before were given; None where another master keeps it."""
    of_run: RunSettings
    """The settings of the epoch that the node is in, as they are published."""
    settings: RunSettings
    """These as its crew goes by them, with its own over them."""
    incarnation_floor: int
    """The highest incarnation of this rank before this process."""
    newest_epoch: int
    """The highest epoch before this process."""
    followed_epoch: int = 0
    """The epoch in which START found the master whose settings it takes."""
    host: str = field(default_factory=lambda: socket.gethostname())
    pid_space: str = field(default_factory=lambda: network.pid_space())
    """Where its pid means its process."""
    others: Sequence[network.Peer] = ()
    """The peers that must reach this node: the master, or of the master all that have come."""
    address: str = network.LOOPBACK
    """Where its peers reach it."""
    processes: int = 1
    """Training processes on it."""
    gpu_count: int = 0

    @classmethod
    def from_start(cls, start: Start) -> "Identity":
        """Return the identity of the node that START has let in."""
        return cls(
            rank=start.rank,
            run_dir=start.run_dir,
            run_id=start.run_id,
            inputs=start.inputs,
            overrides=start.overrides,
            of_run=start.of_run,
            settings=start.settings,
            incarnation_floor=start.incarnation_floor,
            newest_epoch=start.newest_epoch,
            followed_epoch=start.followed_epoch,
            processes=local_processes(start.settings),
            gpu_count=count_gpus(),
        )

    @property
    def is_master(self) -> bool:
        """Whether this node decides."""
        return self.rank == MASTER

    @property
    def leads_run(self) -> bool:
        """Whether this is the run's master, which also leads its crew."""
        return self.is_master and self.overrides is not None

    @property
    def root(self) -> Path:
        """The run directory."""
        return self.run_dir.root

    @property
    def name(self) -> str:
        """What a person calls this node."""
        return self.run_dir.name(self.rank)

    def adopt(self, document: Mapping[str, Any]) -> None:
        """Take over the settings of an epoch record."""
        self.of_run = RunSettings.published(document)
        self.settings = self.inputs.localize(self.of_run).of_crew(self.run_dir.crew, self.run_dir.machines)

    def find_address(self) -> network.Peer:
        """Look which addresses this node has now, and which of them leads to the others; NetworkError if none
        does. Return them all. A machine may get its addresses, or others, after its node has started.
        """
        peer = network.this_peer()
        self.address = network.address_towards(peer, self.others)
        return peer

    def describe(self) -> dict[str, Any]:
        """Return what a heartbeat says of it."""
        try:
            peer = self.find_address()
        except network.NetworkError:  # whoever waits for the address says so
            peer = network.this_peer()
        return {
            "host": self.host,
            "pid": os.getpid(),
            "pid_space": self.pid_space,
            "peer": peer.to_dict(),
            "address": self.address,
            "processes": self.processes,
            "gpu_count": self.gpu_count,
        }
