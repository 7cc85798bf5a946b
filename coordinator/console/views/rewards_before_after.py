"""Compare the rewards of samples before and after another reward has scored them, as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.journal.control_characters import one_line
from rollout.trajectory import Group

SHOWN = 5
"""How many samples are shown, those whose rewards change most."""
EXCERPT = 50
"""How many characters are shown of a prompt, and of the end of an answer."""


@dataclass(frozen=True)
class RewardChange:
    """A sample whose reward is another one now; None: the new reward has failed."""

    iteration: int
    prompt: str
    text: str
    before: float
    after: float | None

    @property
    def distance(self) -> float:
        """How far the reward has moved."""
        return abs(self.after - self.before) if self.after is not None else 0.0


@dataclass
class BeforeAfter:
    """The rewards of an iteration's samples before and after."""

    iteration: int
    samples: int = 0
    groups: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sums of all rewards before, and of those that there are after."""
    failed: int = 0
    flat: list[int] = field(default_factory=lambda: [0, 0])
    """How many groups have nothing but equal rewards, before and after."""
    other_best: int = 0
    """How many groups have another best sample."""
    changes: list[RewardChange] = field(default_factory=list[RewardChange])

    def add(self, group: Group, before: Sequence[float], after: Sequence[float | None]) -> None:
        """Take in the rewards of a group, one for each of its samples, of which it has one at least."""
        known = [reward for reward in after if reward is not None]
        self.samples += len(before)
        self.groups += 1
        self.sums = [self.sums[0] + sum(before), self.sums[1] + sum(known)]
        self.failed += len(after) - len(known)
        self.flat = [self.flat[0] + (len(set(before)) == 1), self.flat[1] + (len(set(known)) <= 1)]
        self.other_best += bool(known) and after[before.index(max(before))] != max(known)
        self.changes += [
            RewardChange(self.iteration, group.prompt, sample.text, old, new)
            for sample, old, new in zip(group.samples, before, after, strict=True)
            if old != new
        ]


def table(iterations: Iterable[BeforeAfter]) -> list[str]:
    """Return a line for each iteration, and the samples whose rewards change most."""
    iterations = list(iterations)
    lines = ["iteration  samples  changed  failed  mean reward      flat groups  other best"]
    for scored in iterations:
        before = scored.sums[0] / max(1, scored.samples)
        after = scored.sums[1] / max(1, scored.samples - scored.failed)
        reward = f"{before:.3f} -> {after:.3f}"
        flat = f"{scored.flat[0]} -> {scored.flat[1]}"
        lines.append(
            f"{scored.iteration:>9}  {scored.samples:>7}  {len(scored.changes):>7}  {scored.failed:>6}  "
            f"{reward:<15}  {flat:<11}  {scored.other_best} of {scored.groups} groups"
        )
    changes = sorted(
        (change for scored in iterations for change in scored.changes), key=lambda c: -c.distance
    )
    for change in changes[:SHOWN]:
        now = "no reward" if change.after is None else f"{change.after:g}"
        prompt, text = one_line(change.prompt.strip()), one_line(change.text.strip())
        prompt = prompt if len(prompt) <= EXCERPT else f"{prompt[:EXCERPT]}..."
        text = text if len(text) <= EXCERPT else f"...{text[-EXCERPT:]}"
        lines.append(f"iteration {change.iteration}: {change.before:g} -> {now}  {prompt} | {text}")
    return lines
