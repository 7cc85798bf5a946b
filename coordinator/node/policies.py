"""The policies of a run as this node finds them: checkpoints, and the model that the run started from."""

import logging

from coordinator.directory import published
from coordinator.directory.published import Incomplete, Policy
from coordinator.machine.weights import Adapters
from coordinator.node.identity import Identity
from coordinator.node.inputs import base_model_dir
from rollout.engines.model_dir import policy_digest
from rollout.storage.files import Moved, unheard
from rollout.storage.known_files import checksums

log = logging.getLogger(__name__)


class Policies:
    """Finds policies by the iteration that trained them, and knows which are verified."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._base_digest = identity.inputs.model_digest
        self._usable: set[int] = set()
        self._verified: set[int] = set()

    def of(self, iteration: int) -> Policy:
        """Return the policy that training of `iteration` made; of 0: the model that the run started from."""
        if iteration > 0:
            return published.policy_of(self._identity.run_dir, iteration)
        directory = base_model_dir(self._identity.settings, self._identity.run_dir)
        self._base_digest = self._base_digest or policy_digest(checksums(directory))
        return Policy(0, directory, self._base_digest)

    @property
    def adapters(self) -> Adapters | None:
        """The model that checkpoints are adapters of, in a run that trains adapters."""
        rank = self._identity.settings.trainer.lora.rank
        return Adapters(self.of(0), rank) if rank else None

    def verify(self, iteration: int, moved: Moved = unheard) -> None:
        """Make sure that a checkpoint may be used; Incomplete says what is damaged.

        One that this process has published was weighed, and is verified in the background. Any other one is
        read, unless somebody has verified it and it has not changed since.
        """
        directory = self._identity.run_dir.checkpoint(iteration)
        if iteration > 0 and (text := published.damage(directory)) is not None:
            raise Incomplete(text)
        if iteration > 0 and iteration not in self._usable and not self.is_verified(iteration):
            self.verify_now(iteration, moved)

    def verify_now(self, iteration: int, moved: Moved = unheard) -> None:
        """Read all of a checkpoint; Incomplete says what is damaged."""
        published.verify_and_record(self._identity.run_dir.checkpoint(iteration), moved)
        self._verified.add(iteration)

    def is_verified(self, iteration: int) -> bool:
        """Return whether somebody has verified this checkpoint."""
        if iteration not in self._verified:
            directory = self._identity.run_dir.checkpoint(iteration)
            if not published.is_verified(directory):
                return False
            self._verified.add(iteration)
        return True

    def know_usable(self, iteration: int) -> None:
        """Take in that a checkpoint was just published by this process."""
        self._verified.discard(iteration)
        self._usable.add(iteration)

    def set_aside(self, iteration: int, error: Incomplete) -> None:
        """Put a damaged checkpoint out of the way; the run goes on from the one before."""
        directory = self._identity.run_dir.checkpoint(iteration)
        log.error("DAMAGED CHECKPOINT: %s; it is set aside as %s.damaged", error, directory)
        published.set_aside(directory, "damaged")
        self.forget(iteration)

    def forget(self, iteration: int) -> None:
        """Take in that there is no such checkpoint any more."""
        self._usable.discard(iteration)
        self._verified.discard(iteration)
