"""Compare a crew that generates with one that trains: on one clock, idle time, what would balance it. Pure.

The clocks of two machines are never compared directly. A crew begins an iteration after the other one has
published what it needs. So each such pair bounds by how much one clock is ahead of the other. The crew that
waits for the other one begins at once, so its bound is close to the truth.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coordinator.console.report.timeline import IDLE, Bar, Span, Timeline, Timelines
from coordinator.console.report.values import duration
from coordinator.protocol.phase import Phase

LAST = 10
"""How many iterations the times of a crew are medians of."""
WORTH = 0.05
"""Another split of the devices is named if it saves more than this part of an iteration."""


def idle_fraction(nodes: Iterable[Sequence[Span]]) -> float:
    """Return which part of their time the nodes of a crew waited for the other crew, between iterations."""
    spans = [span for node in nodes for span in node]
    idle_s = sum(span.wait_s for span in spans if span.phase == IDLE)
    return idle_s / max(sum(span.end_s - span.begin_s for span in spans), 1e-9)


def busy_s(master: Sequence[Span], last: int = LAST) -> float | None:
    """Return the median of the seconds that the last iterations took, without waiting for the other crew.

    None if no iteration went through without a fault. `master`: the spans of the crew's master.
    """
    seconds: dict[int, float] = {}
    broken: set[int] = set()
    for span in master:
        if span.state != "whole":
            broken.add(span.iteration)
        elif span.phase != IDLE:
            seconds[span.iteration] = seconds.get(span.iteration, 0.0) + span.end_s - span.begin_s
    complete = [spent for number, spent in sorted(seconds.items()) if number not in broken]
    return statistics.median(complete[-last:]) if complete else None


class CrewFigures(NamedTuple):
    """A crew as measured."""

    seconds: float
    """Seconds of an iteration, without waiting for the other crew."""
    devices: int

    def with_devices(self, count: int) -> float:
        """Return the seconds of an iteration on other devices, if it scales linearly."""
        return self.seconds * self.devices / count


def what_would_balance(rollout: CrewFigures, train: CrewFigures, max_async_level: int) -> str:
    """Say in sentences what an iteration costs now, and what other devices would change."""
    total = rollout.devices + train.devices
    text = (
        f"Generation takes {duration(rollout.seconds)} an iteration on {_devices(rollout.devices)}, training "
        f"{duration(train.seconds)} on {_devices(train.devices)} (medians of the last iterations). "
    )
    together_s = max(rollout.seconds, train.seconds)
    if max_async_level == 0:
        sum_s = rollout.seconds + train.seconds
        return (
            f"{text}With --max-async-level 0 the crews take turns, so an iteration costs the sum, "
            f"{duration(sum_s)}; with --max-async-level 1 it would cost the longer of the two, "
            f"{duration(together_s)}."
        )
    text += f"An iteration costs the longer of the two, {duration(together_s)}. "

    def cost_s(generating: int) -> float:
        return max(rollout.with_devices(generating), train.with_devices(total - generating))

    best = min(range(1, total), key=cost_s)
    if cost_s(best) < (1 - WORTH) * together_s:
        return (
            f"{text}If both scale linearly with their devices, {_devices(best)} for generation and "
            f"{total - best} for training would be best: {duration(cost_s(best))}."
        )
    slower, work = (rollout, "generation") if rollout.seconds >= train.seconds else (train, "training")
    other_s = min(rollout.seconds, train.seconds)
    if slower.seconds < (1 + WORTH) * other_s:
        return f"{text}The crews are balanced."
    more_s = max(slower.with_devices(slower.devices + 1), other_s)
    return (
        f"{text}No other split of the {_devices(total)} is faster; one more for {work} would make it "
        f"{duration(more_s)}, if that scales linearly."
    )


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def ahead_s(
    rollout: Timelines, train: Timelines, clocks: tuple[str, str], level: int, trusted: str
) -> float | None:
    """Return how far the clock of the train crew's master is ahead of that of the rollout crew's; None if
    nothing relates them.

    `clocks`: of the two masters. `level`: max_async_level. `trusted`: the crew that waits more for the other.
    """
    if clocks[0] == clocks[1]:
        return 0.0
    most = [
        begun.begin_s - last.end_s
        for number in train.iterations
        for last in _only(rollout, number, _last_phase(rollout, number), clocks[0])
        for begun in _only(train, number, Phase.ITERATION_START.label, clocks[1])
    ]
    least = [
        published.end_s - begun.begin_s
        for number in rollout.iterations
        for begun in _only(rollout, number, Phase.ITERATION_START.label, clocks[0])
        for published in _only(train, number - 1 - level, Phase.CHECKPOINT.label, clocks[1])
    ]
    if most and (trusted == "train" or not least):
        return min(most)
    return max(least) if least else None


def _last_phase(rollout: Timelines, number: int) -> str:
    """Return the phase in which an iteration's groups became complete."""
    phases = (Phase.EVAL_ROLLOUT.label, Phase.TRAIN_AGGREGATE.label)
    return next((phase for phase in phases if rollout.masters(number, phase)), phases[-1])


def _only(timelines: Timelines, number: int, phase: str, clock: str) -> list[Span]:
    """Return the master's span of a phase that went through once, on this clock; else nothing."""
    spans = timelines.masters(number, phase)
    return spans if len(spans) == 1 and spans[0].state == "whole" and spans[0].clock == clock else []


def side_by_side(
    rollout: Timelines, train: Timelines, iterations: Sequence[int], level: int, trusted: str
) -> tuple[Timeline, Timeline]:
    """Return the Timeline of each crew during these iterations of the train crew, by its master's clock.

    The rollout crew has no bars if nothing relates its clock.
    """
    clock = train.clock(iterations[-1])
    shown = [number for number in iterations if train.clock(number) == clock]
    zero_s, end_s = train.stretch(shown)
    seconds = end_s - zero_s
    clocks = {rollout.clock(number) for number in rollout.iterations}
    ahead = {other: ahead_s(rollout, train, (other, clock), level, trusted) for other in clocks}
    joined: dict[int, list[Bar]] = {}
    numbers: list[int] = []
    for number in rollout.iterations:
        known_s = ahead[rollout.clock(number)]
        for rank, bars in rollout.bars([number], zero_s - (known_s or 0.0)).items():
            inside = [bar._replace(end_s=min(bar.end_s, seconds)) for bar in bars if bar.begin_s < seconds]
            inside = inside if known_s is not None else []
            joined[rank] = joined.get(rank, []) + inside
            numbers += [number] if inside and number not in numbers else []
    above = Timeline(tuple(numbers), seconds, dict(sorted(joined.items())))
    return above, Timeline(tuple(shown), seconds, train.bars(shown, zero_s))
