"""Loading a policy into the engine of this machine, and proving that the engine answers with it."""

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from coordinator.directory import published
from coordinator.directory.published import Policy
from coordinator.journal.events import Say
from rollout.engines.admin import TO_PROVE, EngineAdmin, WrongWeights, adapter_name
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import ADAPTER_CONFIG, PROBE

log = logging.getLogger(__name__)

TOLERANCE, COARSE = 0.1, {"bfloat16": 0.3, "nf4": 1.5}
"""Largest mean difference of a probe: in float32 or finer, and where one of both computes in a coarser type.
In bfloat16 a sound vLLM differs from transformers by 0.06 to 0.07 (SmolLM2-135M), and larger vocabularies and
experts differ more. Where the trainer holds the base model in NF4 alone: by 0.74 (SmolLM2-135M) and 0.41
(Gemma 3 270M); larger models lose less."""
FIRST_TOKENS = 4
"""Logprobs that an error shows of a probe."""


@dataclass(frozen=True)
class Adapters:
    """The model that a run's adapters are added to, which the engine keeps, and the adapters' rank."""

    base: Policy
    rank: int


class RunningServer(NamedTuple):
    """A server that answers."""

    admin: EngineAdmin
    url: str
    replicas: int
    start: int
    """Which start of the node's own server it is; 0: the user runs it."""
    proves: bool | None = None
    """Whether it can prove its weights; None: the user runs it, so it must be asked."""
    dtype: str = ""
    """The number type that it computes in; empty where that is not known."""


class Loader:
    """Loads policies into a running server, and remembers what it has proved."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.adapters: Adapters | None = None
        """Set where policies of the run may be adapters."""
        self.served: Policy | None = None
        """The policy that the engine was last found to answer with."""
        self._proved: tuple[str, int] | None = None
        """The policy that the node's own server has proved, and which start of it that was."""
        self._met: tuple[int, bool] | None = None
        """Which start of a server was asked what it can prove, and whether it can prove its weights."""
        self._unproved: list[str] = []
        self._proof_s = 0.0
        self._differs: float | None = None

    def name_of(self, policy: Policy) -> str | None:
        """Return the name that requests give for `policy` if it is an adapter; None: the model's own name."""
        if self.adapters is None or not policy.iteration:
            return None
        return adapter_name(policy.digest) if ADAPTER_CONFIG in published.names(policy.directory) else None

    def model_of(self, policy: Policy) -> Policy:
        """Return the whole model that a server starts with to serve `policy`."""
        return policy if self.adapters is None or self.name_of(policy) is None else self.adapters.base

    def load(self, server: RunningServer, policy: Policy, tolerance: float | None = None) -> None:
        """Have the server answer with `policy`, and prove it; EngineError if that cannot be had.

        `tolerance`: how far the mean logprob of a probe may differ; None: as the number types let expect.
        """
        began_s, self._proof_s, self._differs = time.monotonic(), 0.0, None
        fresh = self._meet(server)
        if server.admin.policy() != policy.digest:
            self._reload(server.admin, policy)
            fresh = False
        elif server.admin.is_sleeping():
            server.admin.wake()
        elif server.start and self._proved == (policy.digest, server.start):
            self.served = policy
            return
        self._proved = None
        if (serves := server.admin.policy()) != policy.digest:
            raise EngineError(
                f"the engine at {server.url} serves policy {serves} after loading {policy.digest}"
            )
        if (wrong := self._wrong(server, policy, tolerance, fresh)) is not None:
            log.error("%s\nloading it once more", wrong)
            self._reload(server.admin, policy)
            if (wrong := self._wrong(server, policy, tolerance, fresh=False)) is not None:
                raise EngineError(wrong)
        self._proved, self.served = (policy.digest, server.start), policy
        seconds = round(time.monotonic() - began_s, 3)
        self._say(
            "reload",
            policy=policy.iteration,
            seconds=seconds,
            proof_s=round(self._proof_s, 3),
            probe_differs=self._differs,
        )

    def _meet(self, server: RunningServer) -> bool:
        """Find out what a server can prove, before anything is loaded into it. Return whether it has just
        compared itself to the directory that it was started with.
        """
        if self._met is None or self._met[0] != server.start:
            proves = server.admin.can_prove() if server.proves is None else server.proves
            self._met = server.start, proves
            if not proves:
                log.warning(
                    "the engine at %s cannot prove its weights by content (%s): the logprobs of %s alone are "
                    "compared",
                    server.url, TO_PROVE, PROBE,
                )  # fmt: skip
        elif server.start:
            return False
        # What sleeps cannot be read.
        if not self._met[1] or server.admin.policy() is None or server.admin.is_sleeping():
            return False
        unproved = self._prove(server.admin)
        if unproved and unproved != self._unproved:
            log.warning(
                "the engine at %s changes tensors when it loads them: in %s the logprobs of %s alone are "
                "compared",
                server.url, ", ".join(unproved), PROBE,
            )  # fmt: skip
        self._unproved = unproved
        return bool(server.start)

    def _prove(self, admin: EngineAdmin, *directories: Path) -> list[str]:
        began_s = time.monotonic()
        try:
            return admin.prove(*directories)
        finally:
            self._proof_s += time.monotonic() - began_s

    def _wrong(
        self, server: RunningServer, policy: Policy, tolerance: float | None, fresh: bool
    ) -> str | None:
        """Return the fault of the weights that the engine computes with; None if there is none.

        `fresh`: it has just compared them to the directory that it was started with, which is the policy's.
        """
        assert self._met is not None
        if self._met[1] and not fresh:
            directories = [self.model_of(policy).directory]
            if self.name_of(policy) is not None:
                directories.append(policy.directory)
            try:
                self._prove(server.admin, *directories)
            except WrongWeights as error:
                return str(error)
        return self._probe(server, policy, tolerance)

    def _reload(self, admin: EngineAdmin, policy: Policy) -> None:
        path, like = policy.directory.absolute(), self._like(policy)
        if self.adapters is None or self.name_of(policy) is None:
            admin.reload(path, policy.digest, like=like)
            return
        base, serves = self.adapters.base, admin.policy()
        # A server of the user may hold any model; what this node has loaded before is an adapter of the base.
        if serves != base.digest and (self.served is None or serves != self.served.digest):
            admin.reload(base.directory.absolute(), base.digest)
        admin.load_adapter(path, policy.digest, like=like)

    def _like(self, policy: Policy) -> Path | None:
        """Return a model directory with the same tensors: an engine may answer 200 to weights that lack one.

        It is the policy served before, if the trainer has written both: the user's own model may tie or pad
        its tensors in another way.
        """
        before = self.served
        if before is None or not before.iteration or not policy.iteration or not before.directory.is_dir():
            return None
        same_kind = (self.name_of(before) is None) == (self.name_of(policy) is None)
        return before.directory if same_kind else None

    def _probe(self, server: RunningServer, policy: Policy, tolerance: float | None) -> str | None:
        """Return the fault if the engine's logprobs are not the ones that the trainer wrote, else None.

        Every replica is asked. A checkpoint without a probe passes, and so does the model of the start.
        Proved weights pass with a warning where a coarse number type may be the reason.
        """
        probe = published.read_json(policy.directory / PROBE) if policy.iteration else None
        if probe is None:
            return None
        expected: list[float] = probe["logprobs"]
        types = server.dtype or "its own number type", str(probe.get("computed_in", "float32"))
        coarse = max((COARSE[name] for name in types if name in COARSE), default=None)
        limit = tolerance or coarse or TOLERANCE
        for replica in range(server.replicas):
            actual = server.admin.prompt_logprobs(probe["token_ids"], replica, model=self.name_of(policy))
            mean = sum(abs(a - b) for a, b in zip(expected, actual, strict=True)) / len(expected)
            self._differs = max(mean, self._differs or 0.0)
            if mean <= limit:  # nan is not
                continue
            wrong = (
                f"the engine at {server.url} (replica {replica}) does not compute what the trainer does "
                f"with {policy.directory}: logprobs of its {PROBE} differ by {mean:.4g} on average, "
                f"engine.probe_tolerance is {limit:g}; the first are {_shown(actual)}, the trainer's "
                f"{_shown(expected)}. The engine computes in {types[0]} (engine.args.dtype, or "
                f"engine.dtype), the trainer in {types[1]} (trainer.compute_dtype, trainer.lora.base_dtype)"
            )
            is_proved = self._met == (server.start, True) and not self._unproved
            if math.isnan(mean) or not is_proved or coarse is None:
                return wrong
            log.warning("%s. Its weights are proved by content, so it goes on", wrong)
        return None


def _shown(logprobs: list[float]) -> str:
    return ", ".join(f"{logprob:.3f}" for logprob in logprobs[:FIRST_TOKENS])
