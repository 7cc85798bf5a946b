"""The policies of a run as this node finds them: checkpoints, and the model that the run started from."""

from coordinator.directory import published
from coordinator.directory.published import Policy
from coordinator.machine.weights import Adapters
from coordinator.node.identity import Identity
from coordinator.node.inputs import base_model_dir
from rollout.engines.model_dir import policy_digest
from rollout.storage.known_files import checksums


class Policies:
    """Finds policies by the iteration that trained them, and remembers what it has verified."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._base_digest = identity.inputs.model_digest
        self._whole: set[int] = set()

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

    def verify(self, iteration: int) -> None:
        """Verify the files of a checkpoint, once in this process; Incomplete says what is damaged."""
        if iteration > 0 and iteration not in self._whole:
            published.verify_checkpoint(self._identity.run_dir.checkpoint(iteration))
            self.know_whole(iteration)

    def know_whole(self, iteration: int) -> None:
        """Take in that a checkpoint was just verified."""
        self._whole.add(iteration)
