"""Compute where the time of a run goes, who waits for whom, and the weights that would balance it. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.console.report.timeline import CATEGORIES, IDLE, Span
from coordinator.console.report.values import numbers, phases_s, seconds_of
from coordinator.protocol.phase import Phase
from coordinator.protocol.split_slots import share_sizes

WAITING, OTHER_CREW, BROKEN = "wait", "other crew", "held up"
ORDER = ("rollout", "train", "load", "save", "other", WAITING, OTHER_CREW, BROKEN)
"""What time is spent on. `held up`: phases that a fault broke off, and the time until the run went on."""
MEANINGS = {
    "rollout": "samples of the policy, and evaluation",
    "train": "the batch, and the training job",
    "load": "engines: starts, sleeping, new weights",
    "save": "the checkpoint, written and published",
    "other": "beginning and ending iterations",
    WAITING: "for other nodes",
    OTHER_CREW: "waiting, between two iterations, for what the other crew publishes",
    BROKEN: "phases that a fault broke off, and until the run went on",
}

WRITTEN, TRAINS = "checkpoint_seconds", Phase.TRAINING.label
"""What a metrics line calls the seconds in which the checkpoint was written, and their phase."""
WORTH_FRACTION, WORTH_S = 0.05, 0.1
"""Other weights are suggested if they save more of a rollout than both of these."""


@dataclass(frozen=True)
class TimeShare:
    """A part of the nodes' time."""

    name: str
    seconds: float
    fraction: float


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the protocol table, over all nodes and iterations."""

    phase: str
    category: str
    work_s: float
    wait_s: float


def held_up(spans: Sequence[Span]) -> float:
    """Seconds of a rank in phases that were broken off, and until it went on in a newer epoch."""
    seconds = sum(span.end_s - span.begin_s for span in spans if span.state == "broken")
    for before, after in itertools.pairwise(spans):
        if (after.clock, after.process) == (before.clock, before.process) and after.epoch > before.epoch:
            seconds += max(0.0, after.begin_s - before.end_s)
    return seconds


def time_shares(spans: Mapping[Any, Sequence[Span]], lines: Iterable[Mapping[str, Any]]) -> list[TimeShare]:
    """Return how all nodes together spent their time. `lines`: of the metrics, which say for how long the
    training job has written the checkpoint.
    """
    seconds: dict[str, float] = dict.fromkeys(ORDER, 0.0)
    saved_s = {line.get("iteration"): seconds_of(line, WRITTEN) for line in lines}
    for node in spans.values():
        for span in node:
            load_s = min(span.load_s, span.work_s)
            save_s = (
                min(saved_s.get(span.iteration, 0.0), span.work_s - load_s) if span.phase == TRAINS else 0.0
            )
            seconds[CATEGORIES.get(span.phase, "other")] += span.work_s - load_s - save_s
            seconds["load"] += load_s
            seconds["save"] += save_s
            seconds[OTHER_CREW if span.phase == IDLE else WAITING] += span.wait_s
        seconds[BROKEN] += held_up(node)
    return _shares(seconds)


def node_iterations(spans: Mapping[Any, Sequence[Span]]) -> int:
    """Return the number of iterations, counted once for each node that took part."""
    return sum(len({span.iteration for span in node}) for node in spans.values())


def shares_by_metrics(lines: Iterable[Mapping[str, Any]]) -> list[TimeShare]:
    """Return the shares of a run without events, from the master's phases; they include its waiting."""
    seconds: dict[str, float] = dict.fromkeys(ORDER, 0.0)
    for line in lines:
        for phase, spent in numbers(line, "phase_seconds").items():
            save_s = min(seconds_of(line, WRITTEN), spent) if phase == TRAINS else 0.0
            seconds[CATEGORIES.get(phase, "other")] += spent - save_s
            seconds["save"] += save_s
    return _shares(seconds)


def _shares(seconds: Mapping[str, float]) -> list[TimeShare]:
    total = sum(seconds.values())
    return [TimeShare(name, spent, spent / total) for name, spent in seconds.items() if spent > 0.0]


def phase_times(spans: Mapping[Any, Sequence[Span]]) -> list[PhaseTime]:
    """Work and waiting by phase, in the table's order."""
    work: dict[str, float] = defaultdict(float)
    wait: dict[str, float] = defaultdict(float)
    for node in spans.values():
        for span in node:
            work[span.phase] += span.work_s
            wait[span.phase] += span.wait_s
    phases = [phase.label for phase in Phase if phase.label in work]
    return [PhaseTime(phase, CATEGORIES[phase], work[phase], wait[phase]) for phase in phases]


@dataclass(frozen=True)
class Waiting:
    """How a node spent its time, in seconds."""

    name: str
    work_s: float
    wait_s: float

    @property
    def fraction(self) -> float:
        return self.wait_s / max(self.work_s + self.wait_s, 1e-9)


def waiting(
    spans: Mapping[str, Sequence[Span]], lines: Sequence[Mapping[str, Any]], name: Callable[[int], str]
) -> list[Waiting]:
    """Work and waiting of each node, from the spans, by name; without spans, from the metrics.

    `name`: of a rank of the crew that writes the metrics.
    """
    if any(spans.values()):
        return [
            Waiting(node, sum(span.work_s for span in node_spans), sum(span.wait_s for span in node_spans))
            for node, node_spans in spans.items()
        ]
    waited: dict[int, float] = defaultdict(float)
    present: dict[int, float] = defaultdict(float)
    for line in lines:
        for rank, seconds in numbers(line, "wait_seconds").items():
            if rank.isascii() and rank.isdecimal():
                waited[int(rank)] += seconds
                present[int(rank)] += phases_s(line)
    return [
        Waiting(name(rank), max(0.0, present[rank] - waited[rank]), waited[rank]) for rank in sorted(waited)
    ]


def rollout_work(
    spans: Mapping[int, Sequence[Span]], ranks: Iterable[int], last: int
) -> dict[int, dict[int, float]]:
    """{iteration: {rank: seconds of train_rollout}} without engine starts and the master's conclusion. Takes
    the `last` iterations in which each of `ranks` made its share in one piece.
    """
    rollouts: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for span in spans.get(rank, []):
            if span.phase == Phase.TRAIN_ROLLOUT.label:
                rollouts[span.iteration][rank].append(span)
    expected = set(ranks)
    complete = [
        iteration
        for iteration, by_rank in sorted(rollouts.items())
        if by_rank.keys() == expected
        and all(len(pieces) == 1 and pieces[0].state == "whole" for pieces in by_rank.values())
    ]
    return {
        iteration: {
            rank: max(0.0, span.work_s - span.load_s - span.then_s)
            for rank, (span,) in rollouts[iteration].items()
        }
        for iteration in complete[-last:]
    }


@dataclass(frozen=True)
class Balance:
    """Weights under which the nodes would finish a rollout together."""

    weights: dict[int, float]
    """The smallest is 1."""
    now_s: float
    """Seconds that the slowest node takes in an iteration."""
    then_s: float

    @property
    def option(self) -> str:
        return "--rank-weights " + ",".join(f"{weight:g}" for _, weight in sorted(self.weights.items()))

    @property
    def worth_it(self) -> bool:
        return self.now_s - self.then_s > max(WORTH_S, WORTH_FRACTION * self.now_s)


def balance(work_s: Mapping[int, float], tasks: Mapping[int, float]) -> Balance | None:
    """Compute weights from the seconds that each rank worked for its tasks, as means over iterations. None
    for one node, or if a rank had nothing to do.
    """
    if len(work_s) < 2 or min(work_s.values()) <= 0.0 or any(tasks.get(rank, 0) <= 0 for rank in work_s):
        return None
    speed = {rank: tasks[rank] / seconds for rank, seconds in work_s.items()}
    slowest = min(speed.values())
    weights = {rank: round(value / slowest, 1) for rank, value in speed.items()}
    sizes = share_sizes(round(sum(tasks[rank] for rank in work_s)), weights)
    then_s = max(size / speed[rank] for rank, size in sizes.items())
    return Balance(weights, max(work_s.values()), then_s)
