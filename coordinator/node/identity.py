"""The identity of a node: the facts that its parts share."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.directory.layout import GUESTS, MASTER
from coordinator.machine import network
from coordinator.machine.gpus import count_gpus, least_gpu_bytes
from coordinator.settings.tree import RunSettings
from coordinator.start.inputs import local_processes
from coordinator.start.start import NodeStart
from rollout.environment_variables import memory_bytes


@dataclass
class Identity(NodeStart):
    """Facts about this node, from START on. Its settings change with each epoch, its addresses with its
    network.
    """

    host: str = field(default_factory=lambda: socket.gethostname())
    pid_space: str = field(default_factory=lambda: network.pid_space())
    """Where its pid means its process."""
    peers: Sequence[network.Peer] = ()
    """The peers that must reach this node: the master, or of the master all that have come."""
    address: str = network.LOOPBACK
    """Where its peers reach it."""
    processes: int = 1
    """Training processes on it."""
    gpu_count: int = 0
    gpu_bytes: float | None = None
    """The memory of its smallest GPU, if it trains on several that say so."""
    host_bytes: float = 0.0
    """The memory of its machine."""

    @classmethod
    def from_start(cls, start: NodeStart) -> "Identity":
        """Return the identity of the node that START has let in."""
        processes = local_processes(start.settings)
        return cls(
            **vars(start),
            processes=processes,
            gpu_count=count_gpus(),
            gpu_bytes=least_gpu_bytes() if processes > 1 and count_gpus() else None,
            host_bytes=memory_bytes(),
        )

    @property
    def is_master(self) -> bool:
        """Whether this node decides."""
        return self.rank == MASTER

    @property
    def is_guest(self) -> bool:
        """Whether this node is in no epoch: nobody waits for it, and it ends nobody."""
        return self.rank >= GUESTS

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
        self.address = network.address_towards(peer, self.peers)
        return peer

    def describe(self) -> dict[str, Any]:
        """Return the heartbeat's fields about it."""
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
            "gpu_bytes": self.gpu_bytes,
            "host_bytes": self.host_bytes,
        }
