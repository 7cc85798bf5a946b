"""What the waits of a node have in common that are outside of its phases."""

from dataclasses import dataclass

from coordinator.node.identity import Identity
from coordinator.node.messages import Messages
from coordinator.node.phase_endings import PhaseEndings
from coordinator.node.position import Position
from coordinator.protocol.watch import Watch
from coordinator.settings.cluster import ClusterSettings


@dataclass
class NodeWait:
    """A wait of a node: for its master, for its workers, or for the shared directory."""

    identity: Identity
    position: Position
    watch: Watch
    messages: Messages
    phase_endings: PhaseEndings

    @property
    def _cluster(self) -> ClusterSettings:
        return self.identity.settings.cluster
