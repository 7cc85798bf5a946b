"""The state of one iteration, and of no other; every phase's function is given it."""

import time
from dataclasses import dataclass, field
from typing import Any

from coordinator.directory.published import Policy
from coordinator.node.flags import Payload
from coordinator.protocol.phase import Phase, phases_of
from coordinator.settings.tree import RunSettings


@dataclass
class Iteration:
    """One pass of the protocol table on this node, in one epoch."""

    number: int
    begun_s: float = field(default_factory=time.monotonic)
    """The moment at which a process of this rank first began the iteration, on this machine."""
    phase_begun_s: float | None = None
    """The moment at which its present phase began; None before the first."""
    resume_at: Phase = Phase.TRAIN_PLAN
    """The first phase that runs after phase 0; earlier ones are done."""
    documents: dict[Phase, Payload] = field(default_factory=dict[Phase, Payload])
    """What the master's flags have said."""
    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase, by label, as this process finished it last; epochs before count."""
    ended_in: dict[str, int] = field(default_factory=dict[str, int])
    """The epoch in which this process finished each phase last, by label."""
    work_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of this node's own work in each phase, by label."""
    copied: Policy | None = None
    """The policy that this iteration has trained, in a copy on this machine, while its checkpoint is not
    durable."""
    ahead_s: float = 0.0
    """For how long this node has made groups of the iteration before its phase had begun."""
    engine_s: float | None = None
    """For how long its training rollout waited for this node's engine to start, or to load the policy."""
    progress: dict[str, Any] = field(default_factory=dict[str, Any])
    """What this node's position has said at the end of the training rollout (Position.describe)."""
    waited_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of a phase in which this node had nothing to do but to see whether others leave something."""

    def again(self) -> "Iteration":
        """Return this iteration as another epoch begins it, with the times of what is finished."""
        begun = Iteration(self.number, self.begun_s, ahead_s=self.ahead_s, engine_s=self.engine_s)
        begun.phase_s, begun.work_s = dict(self.phase_s), dict(self.work_s)
        begun.ended_in, begun.progress = dict(self.ended_in), self.progress
        return begun

    @property
    def header(self) -> Payload:
        """What the master said when it opened the iteration: resume_at, policy, iteration.json."""
        return self.documents[Phase.ITERATION_START]

    @property
    def opened(self) -> Payload:
        """The iteration.json as the master has read it: while it may be made anew, a client may remember the
        one before.
        """
        return self.header["opened"]

    def has(self, phase: Phase, settings: RunSettings) -> bool:
        """Return whether a phase is to run: it belongs to this kind of run, and is not done."""
        is_done = Phase.ITERATION_START < phase < self.resume_at
        return not is_done and phase in phases_of(settings.kind)
