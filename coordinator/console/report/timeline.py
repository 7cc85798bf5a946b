"""Turn events into spans of time, and put the spans of an iteration on one clock. Pure.

The times of two machines' clocks are never compared directly. A worker sees the end of a phase just after the
master's flag. So its clock is ahead of the master's by the smallest (worker's end - master's end) of all
phases of an iteration. Clocks drift, so this is computed for each iteration.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from coordinator.console.report.values import seconds_of
from coordinator.directory.layout import MASTER
from coordinator.protocol.phase import Category, Phase

CATEGORIES: dict[str, Category] = {phase.label: phase.category for phase in Phase}
"""What a phase is counted as, by its label."""

IDLE = "idle"
"""The phase of a span between two iterations, in which a crew waits for the other one."""

BREAKS = frozenset({"epoch", "process", "exit", "begin"})
"""Events that end a phase which has no end of its own."""


class Span(NamedTuple):
    """A phase on a node, in seconds of that node's clock."""

    rank: int
    clock: str
    """Host, and how often its clock has restarted. Times of one clock can be compared."""
    process: int
    """The number of the process of this rank."""
    epoch: int
    iteration: int
    phase: str
    begin_s: float
    end_s: float
    work_s: float
    """Seconds of work, with engine starts and conclusion; 0 in a phase that was broken off."""
    load_s: float
    """Seconds of the work in which an engine started."""
    then_s: float
    """Seconds of the work in which the master concluded the phase, after it had waited for the others."""
    state: Literal["whole", "broken", "open"]
    """broken: another event came before its end. open: no event came after it."""

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for others. A broken phase has neither work nor waiting."""
        return max(0.0, self.end_s - self.begin_s - self.work_s) if self.state == "whole" else 0.0


def spans_of(rank: int, lines: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the phases of a rank from its events. Events of superseded processes are left out."""
    spans: list[Span] = []
    clocks: dict[str, int] = defaultdict(int)
    host, process, newest, last_s, load_s = "", 0, 0, 0.0, 0.0
    begun: Mapping[str, Any] | None = None

    def span(
        end_s: float, state: Literal["whole", "broken", "open"], work_s: float = 0.0, then_s: float = 0.0
    ) -> Span:
        assert begun is not None
        place = (begun["e"], begun["it"], begun["row"], begun["t"])
        return Span(rank, f"{host}#{clocks[host]}", process, *place, end_s, work_s, load_s, then_s, state)

    for line in lines:
        if line["n"] < newest:
            continue
        newest, event = line["n"], line["what"]
        if begun is not None and event in BREAKS:
            spans.append(span(last_s if event == "process" else line["t"], "broken"))
            begun = None
        if event == "process":
            process += 1
            clocks[str(line.get("host", ""))] += line["t"] < last_s and line.get("host") == host
            host = str(line.get("host", ""))
        elif event == "begin":
            begun, load_s = line, 0.0
        elif (
            event == "end" and begun is not None and line["it"] == begun["it"] and line["row"] == begun["row"]
        ):
            seconds = max(0.0, line["t"] - begun["t"])
            work_s = min(line["work_s"], seconds)
            spans.append(span(line["t"], "whole", work_s, min(seconds_of(line, "then_s"), work_s)))
            begun = None
        elif event == "engine_ready" and begun is not None:
            load_s += max(0.0, min(seconds_of(line, "seconds"), line["t"] - begun["t"]))
        last_s = line["t"]
    return [*spans, span(last_s, "open")] if begun is not None else spans


def with_idle(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of a node of one of two crews, with one for each time between two iterations: then the
    crew waits until the other one has published what the next iteration needs.
    """
    filled = list(spans[:1])
    for before, after in itertools.pairwise(spans):
        same = (before.clock, before.process, before.epoch) == (after.clock, after.process, after.epoch)
        if same and before.state == "whole" and before.iteration < after.iteration:
            between = {"phase": IDLE, "begin_s": before.end_s, "end_s": max(before.end_s, after.begin_s)}
            filled.append(after._replace(**between, work_s=0.0, load_s=0.0, then_s=0.0, state="whole"))
        filled.append(after)
    return filled


class Bar(NamedTuple):
    """A span on the clock of its iteration: seconds since the iteration began."""

    begin_s: float
    end_s: float
    span: Span


@dataclass(frozen=True)
class Timeline:
    """The nodes of a crew side by side."""

    iterations: tuple[int, ...]
    seconds: float
    bars: dict[int, list[Bar]]
    """By rank; empty for a rank whose clock cannot be related to the master's."""


class Timelines:
    """The iterations of a run, from the spans of its ranks."""

    def __init__(
        self, spans: Mapping[int, Sequence[Span]], here_s: Mapping[int, float] | None = None
    ) -> None:
        """`here_s`: how long ranks have been in their open phases, where it is known."""
        self._spans: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for rank, node in spans.items():
            for span in node:
                if span.state == "open":
                    span = span._replace(end_s=max(span.end_s, span.begin_s + (here_s or {}).get(rank, 0.0)))
                self._spans[span.iteration][rank].append(span)

    @property
    def iterations(self) -> list[int]:
        """The iterations that the master has begun, in order."""
        return sorted(number for number, ranks in self._spans.items() if MASTER in ranks)

    def seconds(self, iteration: int) -> float:
        """Return how long it took, by the master's clock."""
        begin_s, end_s = self.stretch([iteration])
        return end_s - begin_s

    def clock(self, iteration: int) -> str:
        """Return the last clock that the master had in an iteration."""
        return self._spans[iteration][MASTER][-1].clock

    def masters(self, iteration: int, phase: str) -> list[Span]:
        """Return the master's spans of a phase, on all its clocks."""
        return [span for span in self._spans[iteration].get(MASTER, []) if span.phase == phase]

    def stretch(self, iterations: Sequence[int]) -> tuple[float, float]:
        """Return when the first of the iterations began and the last one ended, by the master's clock, which
        they have in common.
        """
        spans = [span for number in iterations for span in self._masters(number)]
        return min(span.begin_s for span in spans), max(span.end_s for span in spans)

    def timeline_of(self, iteration: int) -> Timeline:
        """Return the timeline of all nodes. If the master moved to another machine, it begins there."""
        bars = self.bars([iteration], self.stretch([iteration])[0])
        seconds = max((bar.end_s for node in bars.values() for bar in node), default=0.0)
        return Timeline((iteration,), seconds, bars)

    def bars(self, iterations: Sequence[int], zero_s: float) -> dict[int, list[Bar]]:
        """Return the spans of all nodes from `zero_s` of the master's clock on, which the iterations have in
        common.
        """
        bars: dict[int, list[Bar]] = {
            rank: [] for number in iterations for rank in sorted(self._spans[number])
        }
        for number in iterations:
            for rank, spans in self._spans[number].items():
                ahead = {
                    clock: self._ahead_s(number, rank, clock) for clock in {span.clock for span in spans}
                }
                bars[rank] += [
                    Bar(max(0.0, span.begin_s - ahead_s - zero_s), span.end_s - ahead_s - zero_s, span)
                    for span in spans
                    if (ahead_s := ahead[span.clock]) is not None and span.end_s - ahead_s >= zero_s
                ]
        return dict(sorted(bars.items()))

    def _masters(self, iteration: int) -> list[Span]:
        """Return the master's spans on the last clock that it had in this iteration."""
        spans = self._spans[iteration][MASTER]
        return [span for span in spans if span.clock == spans[-1].clock]

    def _ahead_s(self, iteration: int, rank: int, clock: str) -> float | None:
        """Return how far this clock of the rank is ahead of the master's; None if it is unknown."""
        masters = self._masters(iteration)[-1].clock
        if clock == masters:
            return 0.0
        by_distance = sorted(self._spans, key=lambda number: abs(number - iteration))
        for number in by_distance[:NEIGHBOURS]:
            ends = _ends(self._spans[number].get(MASTER, []), masters)
            rank_ends = _ends(self._spans[number].get(rank, []), clock)
            if common := ends.keys() & rank_ends.keys():
                return min(rank_ends[phase] - ends[phase] for phase in common)
        return None


def _ends(spans: Sequence[Span], clock: str) -> dict[tuple[int, str], float]:
    """When the whole phases ended, by (epoch, phase), on one clock."""
    return {
        (span.epoch, span.phase): span.end_s
        for span in spans
        if span.state == "whole" and span.clock == clock
    }


NEIGHBOURS = 9
"""How many iterations around it are searched for a common phase."""
