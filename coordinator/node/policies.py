"""The policies of a run as this node finds them: checkpoints, and the model that the run started from."""

import logging
from dataclasses import replace

from coordinator.directory import published
from coordinator.directory.published import Incomplete, Policy
from coordinator.machine.store import Store
from coordinator.node.identity import Identity
from coordinator.node.inputs import base_model_dir
from rollout.engines.model_dir import is_model_file, policy_digest
from rollout.storage import known_files
from rollout.storage.files import Moved, unheard

log = logging.getLogger(__name__)


class Policies:
    """Finds policies by the iteration that trained them, and knows which are verified."""

    def __init__(self, identity: Identity, store: Store) -> None:
        self._identity = identity
        self._store = store
        self._base_files = identity.inputs.model_files
        self._usable: set[int] = set()
        self._verified: set[int] = set()

    def of(self, iteration: int) -> Policy:
        """Return the policy that training of `iteration` made; of 0: the model that the run started from."""
        if iteration > 0:
            return published.policy_of(self._identity.run_dir, iteration)
        directory = base_model_dir(self._identity.settings, self._identity.run_dir)
        self._base_files = self._base_files or known_files.checksums(directory, is_model_file)
        return Policy(0, directory, policy_digest(self._base_files))

    def hold(self, policy: Policy, moved: Moved) -> Policy:
        """Return the policy from a directory of this machine, for engines and trainers; see Store.hold.

        Of a checkpoint it is the model, without the trainer's state and what describes the training.
        """
        wanted = self._base_files
        if policy.iteration > 0:
            written = published.read_result(policy.directory).files
            wanted = {name: facts for name, facts in written.items() if "/" not in name}
        return replace(policy, directory=self._store.hold(policy.directory.absolute(), wanted, moved))

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
