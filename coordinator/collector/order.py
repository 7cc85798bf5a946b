"""Orders of a node to its collector, and errors that come back from it. Both cross as JSON."""

import errno
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory.layout import Kind
from coordinator.directory.published import Incomplete
from coordinator.settings.placement import Crew
from rollout.collect import AllGivenUp
from rollout.engines.answers import EngineError, EngineFacts
from rollout.environments.segments import Segment
from rollout.origin import Origin, Sampling
from rollout.quota import Quota
from rollout.rewards.reward import RewardError
from rollout.settings import RolloutSettings
from rollout.storage.retry import SharedFsError


class CollectorFailed(RuntimeError):
    """The collector has ended, or has failed in a way that nobody expects. The text says how."""


@dataclass(frozen=True)
class EngineAddress:
    """The engine that generates, as its clients need it."""

    url: str
    model: str | None
    request_timeout_s: float
    retry_s: float
    facts: EngineFacts


@dataclass(frozen=True)
class RecipeNames:
    """How the groups of some slots are made, by the names that the settings give."""

    reward: str
    environment: str
    sampling: Sampling


@dataclass(frozen=True)
class Order:
    """The groups that a collector is to make. Slots are asked of the node when they are begun."""

    key: str
    """Stands for how the groups are made: two orders with one key make the same groups of the same slots."""
    kind: Kind
    iteration: int
    epoch: int
    rank: int
    phase: int
    root: str
    """The run directory."""
    incarnation: int
    """Incarnation of the node's process."""
    crew: Crew
    quota: Quota
    origin: Origin
    recipes: Mapping[str, RecipeNames]
    """By the kind of a slot; `""`: those of training, or of --eval-tasks."""
    sources: Mapping[str, tuple[str, str]]
    """The source of the user's modules as the node has read it, by module: file and text."""
    settings: RolloutSettings
    engine: EngineAddress | None
    """Address of the engine; None: nothing is generated."""
    start_model: str
    """The directory of the model that the run started from, for what needs only its tokenizer."""
    claim_pause_s: float
    """The longest pause between two looks at the claims."""
    guest_patience_s: float = 30.0
    """For how long a guest may make chunks that the master has never seen beat."""
    is_held: bool = False
    """Whether nothing is published of what is finished: it is begun before its phase."""
    in_flight: Sequence[int] = ()
    """Slots that are in flight in the collector from an order before, and go on."""
    again: Sequence[int] = ()
    """Slots that are made in any case, before the others."""
    alone: Sequence[int] = ()
    """Slots of `again` in whose making a collector has ended: they are made one at a time, first."""
    given_up: Mapping[int, str] = field(default_factory=dict[int, str])
    """Slots that are given up, and why."""
    slots: Sequence[int] = ()
    """Slots of this share, spare ones last; none where slots are claimed."""
    needed: int = 0
    """How many of `slots` are to be made."""
    claimed: Mapping[str, Any] | None = None
    """Chunks of the plan (protocol.chunks) and its `spare` slots, where slots are claimed."""
    first_part: int = 0
    """Number of the last part before this order; its parts are numbered from the next one on."""
    begun: Sequence[BegunGroup] = ()
    """What the first slots of the iteration go on with."""
    segment: Segment | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON has it."""
        return _adapter().dump_python(self, mode="json")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Order":
        """Return the order that a JSON document holds."""
        return _adapter().validate_python(document)


@cache
def _adapter() -> TypeAdapter[Order]:
    return TypeAdapter(Order)


EXPECTED: tuple[type[Exception], ...] = (AllGivenUp, RewardError, EngineError, Incomplete, CollectorFailed)
"""Errors that end a phase and whose text says all there is to know."""


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a message."""
    if isinstance(error, SharedFsError | FileNotFoundError):  # the latter: nothing is mounted there
        return {"kind": "SharedFsError", "text": str(error), "errno": error.errno}
    kind = next((known.__name__ for known in EXPECTED if isinstance(error, known)), "")
    if kind:
        return {"kind": kind, "text": str(error)}
    trace = "".join(traceback.format_exception(error))
    return {"kind": "", "text": f"{type(error).__name__}: {error}", "traceback": trace}


def error_of(message: Mapping[str, Any]) -> Exception:
    """Return the error that a message describes."""
    if message["kind"] == "SharedFsError":
        return _fs_error(message["errno"], message["text"])
    kind = next((known for known in EXPECTED if known.__name__ == message["kind"]), CollectorFailed)
    return kind(message["text"])


def _fs_error(number: int | None, text: str) -> SharedFsError:
    number = number or errno.EIO
    error = SharedFsError("write", Path(), OSError(number, os.strerror(number)), 0.0)
    error.args = (number, text)
    return error
