"""The policies of a run as this node finds them: checkpoints, and the model that the run started from."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.published import Incomplete, Policy, is_part_of_model
from coordinator.machine.store import Store
from coordinator.node.identity import Identity
from coordinator.start.inputs import base_model_dir
from rollout.engines.model_dir import FROZEN, model_files, policy_digest
from rollout.storage import known_files
from rollout.storage.delta import delta_name
from rollout.storage.hashing import CountBytes, FileFacts, unheard
from rollout.storage.writer import THREADS
from trainer.documents import TrainResult

log = logging.getLogger(__name__)


class Policies:
    """Finds policies by the iteration that trained them, and knows which are verified."""

    def __init__(self, identity: Identity, store: Store) -> None:
        self._identity = identity
        self._store = store
        self._base_files = identity.inputs.model_files
        self._usable: set[int] = set()
        self._verified: set[int] = set()
        self._fetched: dict[int, str] = {}
        """Iteration -> digest of the policy whose model was read and compared with its checksums."""

    def policy_of(self, iteration: int) -> Policy:
        """Return the policy that training of `iteration` made; of 0: the model that the run started from."""
        if iteration > 0:
            return published.policy_of(self._identity.run_dir, iteration)
        directory = base_model_dir(self._identity.settings, self._identity.run_dir)
        self._base_files = self._base_files or known_files.checksums(directory, model_files(directory))
        return Policy(0, directory, policy_digest(self._base_files))

    def hold(self, policy: Policy, count_bytes: CountBytes, threads: int = THREADS) -> Policy:
        """Return the policy from a directory of this machine, for engines and trainers; see Store.hold.

        Of a checkpoint it is the model, without the trainer's state and what describes the training. Where
        the trainer has written deltas to a policy that this machine has, these are read in place of it.
        """
        model, before = self._base_files, None
        if policy.iteration > 0:
            result = policy.result or published.read_result(policy.directory)
            model, before = _model_files(result), self._files_before(policy, result)
        directory = self._store.hold(policy.directory.absolute(), model, count_bytes, before, threads)
        return replace(policy, directory=directory)

    def size_of(self, iteration: int) -> int:
        """Return the bytes of a policy's model; of the next one it has about the same."""
        policy = self.policy_of(iteration)
        model = _model_files(policy.result) if policy.result is not None else self._base_files
        return sum(facts["bytes"] for facts in (model or {}).values())

    def _files_before(self, policy: Policy, result: TrainResult) -> Mapping[str, Path]:
        """Return, by name, the files of this machine that deltas in this policy's checkpoint belong to, or
        that have not changed.
        """
        names = [name for name in result.files if delta_name(name) in result.files or name == FROZEN]
        earlier = self._identity.run_dir.checkpoint(policy.iteration - 1)
        if not names or earlier.name not in published.names(earlier.parent):
            return {}
        try:
            older = published.read_result(earlier)
        except Incomplete:
            return {}
        copy = self._store.find(_model_files(older)) if older.policy == result.base_policy else None
        if copy is None:
            return {}
        unchanged = older.files.get(FROZEN) == result.files.get(FROZEN)
        return {name: copy / name for name in names if name != FROZEN or unchanged}

    def fetch(self, iteration: int, count_bytes: CountBytes, threads: int = THREADS) -> None:
        """Have the model of a checkpoint on this machine. The trainer's state is left alone.

        It is verified while it is copied. If nothing has to be copied, a crew that only generates reads it to
        verify it: no other phase of its own does. Raises as Store.hold.
        """
        policy = self.policy_of(iteration)
        copies = self._identity.settings.engine.url is None
        held_policy = self.hold(policy, count_bytes, threads) if copies else policy
        is_copied = held_policy.directory.absolute() != policy.directory.absolute()
        if not is_copied and self._identity.run_dir.crew == "rollout":
            published.verify_checkpoint(policy.directory, count_bytes, threads, is_part_of_model)
        self._fetched[iteration] = policy.digest

    def verify(self, iteration: int, count_bytes: CountBytes = unheard) -> None:
        """Make sure that a checkpoint may be used; Incomplete says what is damaged.

        One that this process has published was weighed, and is verified in the background. Any other one is
        read, unless somebody has verified it and it has not changed since. A crew that only generates needs
        the model alone, and fetches that.
        """
        directory = self._identity.run_dir.checkpoint(iteration)
        if iteration > 0 and (text := published.damage(directory)) is not None:
            raise Incomplete(text)
        if iteration == 0 or iteration in self._usable or self.is_verified(iteration):
            return
        if self._identity.run_dir.crew != "rollout":
            self.verify_now(iteration, count_bytes)
        elif self._fetched.get(iteration) != self.policy_of(iteration).digest:
            self.fetch(iteration, count_bytes)

    def verify_now(self, iteration: int, count_bytes: CountBytes = unheard) -> None:
        """Read all of a checkpoint; Incomplete says what is damaged."""
        published.verify_and_record(self._identity.run_dir.checkpoint(iteration), count_bytes)
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
        self._fetched.pop(iteration, None)


def _model_files(result: TrainResult) -> dict[str, FileFacts]:
    return {name: facts for name, facts in result.files.items() if is_part_of_model(name)}
