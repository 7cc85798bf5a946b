"""The origin of samples: a policy, how it is sampled, and the code of an environment and a reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. Completion j of `n` is drawn with `seed` + j; None: with any seed."""

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    tool_parser: str = "auto"
    """What reads tool calls from the text; see rollout.environments.tool_calls."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the model's chat template gets."""
    reasoning_end: str | None = None
    """What ends the reasoning of a completion; its answer follows."""
    thinking_tokens: int | None = None
    """Longest reasoning of a single turn, in tokens."""
    history: str = "sampled"
    """How an agent's earlier turns look to the model: `sampled`, or as the chat `template` renders them."""
    seed: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """What one request asks of the engine beside that: `logprobs`, `response_format`."""


@dataclass(frozen=True)
class Code:
    """Something that the settings name (a reward, an environment), and what lies behind the name."""

    name: str
    digest: str
    """16 hex characters of the SHA-256 of its source."""


@dataclass(frozen=True)
class Origin:
    """What the samples of one part, or of one iteration, are made with."""

    policy: str
    """Digest of the policy."""
    policy_iteration: int
    """The iteration whose training made the policy; 0: the model that the run started from."""
    sampling: Sampling
    """`n` is the samples of a group. A group has its seed from its slot."""
    reward: Code
    environment: Code

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the origin that a document holds, maybe among other things."""
        return _adapter(cls).validate_python(document)

    def difference(self, other: "Origin") -> str | None:
        """Say in what `other` differs so that no manifest may hold samples of both; None: in nothing.

        The source of reward and environment may differ: a run goes on with another one if it is told to.
        """
        fixed, other_fixed = self._fixed(), other._fixed()
        different = [name for name in fixed if fixed[name] != other_fixed[name]]
        return f"{different[0]} {other_fixed[different[0]]}, not {fixed[different[0]]}" if different else None

    def _fixed(self) -> dict[str, Any]:
        named = {"reward": self.reward.name, "environment": self.environment.name}
        return {"policy": self.policy, **origin_document(self.sampling), **named}


@cache
def _adapter(kind: type[Origin]) -> TypeAdapter[Any]:
    """Return the adapter that validates documents; to make it takes ten times as long as to use it."""
    return TypeAdapter(kind)


def origin_document(record: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it; a `Sampling` in it without its seed, which is each group's own, and
    without what is one request's own.
    """
    document = to_jsonable_python(record)
    for sampling in (document, document.get("sampling", {})):
        sampling.pop("seed", None)
        sampling.pop("more", None)
    return document
