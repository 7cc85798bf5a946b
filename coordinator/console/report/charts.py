"""Compute the geometry of the page's charts, which the template draws as SVG. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.console.report.timeline import CATEGORIES, IDLE, Bar, Timeline
from coordinator.console.views.heartbeats import is_number
from coordinator.directory.layout import MASTER

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
"""Size and margins of a chart, in its own units: one is a pixel on a phone."""

POINTS = 240
"""A line with more points is drawn as the means of so many stretches, with a band from minimum to maximum."""
MARKED = 40
"""A line with at most this many points gets a mark for each."""

SAME, TINY = 1e-9, 1e-100
"""Values whose relative difference is below SAME are drawn as equal, and those below TINY as 0."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A line of a chart, in the chart's units."""

    label: str
    path: str
    band: str
    """The outline from minimum to maximum; empty if every point is drawn."""
    marks: list[tuple[float, float, str]]
    """x, y, text."""
    readings: list[tuple[float, int, str]]
    """Shown when somebody points at the chart: x, iteration, value."""


@dataclass(frozen=True)
class Chart:
    """A line chart over iterations."""

    title: str
    note: str
    unit: str
    axis: str
    """What a value stands at: `iteration`, or `policy of iteration`."""
    curves: list[Curve]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    summary: str
    """The lines in words."""
    first: int
    last: int
    """The iterations at the ends of the x axis."""
    is_flat: bool = False
    """Whether each line has one value in all iterations: its words say as much as its drawing."""
    fork: tuple[float, int] | None = None
    """Of a forked run: the x up to which the lines are those of the run that it comes from, and the
    iteration at which it was forked.
    """

    def forked_at(self, iteration: int) -> "Chart":
        """Return the chart of a run that was forked at this iteration."""
        if not self.first < iteration <= self.last:
            return self
        place = round(_x(iteration - 0.5, self.first, self.last), 1)
        return replace(self, fork=(place, iteration))


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers in about `count` steps, the first <= low, the last >= high; `whole`: integers."""
    span = high - low or abs(high) or 1.0
    rough = max(span / count, 1.0) if whole else span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor
        for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
        if power * factor >= rough * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def number_text(value: float) -> str:
    """`0.61`, `1240`, `12.3k`, `1e-06`: three digits or so."""
    if abs(value) >= 10_000:
        scaled, unit = (value / 1e6, "M") if abs(value) >= 1e6 else (value / 1e3, "k")
        return f"{scaled:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def chart(
    title: str, note: str, unit: str, lines: Sequence[tuple[str, Points]], axis: str = "iteration"
) -> Chart:
    """Return a chart of the lines (label, [(iteration, value)]). Lines without a value to draw
    are left out.
    """
    lines = [(label, drawable) for label, points in lines if (drawable := _drawable(points))]
    iterations = [iteration for _, points in lines for iteration, _ in points] or [0]
    values = [value for _, points in lines for _, value in points] or [0.0]
    first, last = min(iterations), max(iterations)
    ticks = nice_ticks(*_range(values), 4)
    bottom = HEIGHT - BOTTOM

    def x(iteration: float) -> float:
        return _x(iteration, first, last)

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    curves: list[Curve] = []
    for label, points in lines:
        stretches = _stretches(points)
        means = [
            (sum(n for n, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in stretches
        ]
        band = ""
        if len(stretches) < len(points):
            upper = [(n, max(v for _, v in part)) for (n, _), part in zip(means, stretches, strict=True)]
            lower = [(n, min(v for _, v in part)) for (n, _), part in zip(means, stretches, strict=True)]
            band = _path([(x(n), y(v)) for n, v in [*upper, *reversed(lower)]]) + "Z"
        marks = points if len(points) <= MARKED else points[-1:]
        curves.append(
            Curve(
                label,
                _path([(x(n), y(v)) for n, v in means]),
                band,
                [
                    (round(x(n), 1), round(y(v), 1), f"{axis} {n}: {label} {number_text(v)}{unit}")
                    for n, v in marks
                ],
                [(round(x(n), 1), round(n), number_text(v)) for n, v in means],
            )
        )
    return Chart(
        title,
        note,
        unit,
        axis,
        curves,
        [(round(x(n), 1), str(n)) for n in _iteration_ticks(first, last)],
        [(round(y(tick), 1), number_text(tick)) for tick in ticks],
        "; ".join(_words(label if len(lines) > 1 else "", points, unit) for label, points in lines),
        first,
        last,
        is_flat=first < last and all(_is_flat(points) for _, points in lines),
    )


def _x(iteration: float, first: int, last: int) -> float:
    right = WIDTH - RIGHT
    return (
        (LEFT + right) / 2 if first == last else LEFT + (right - LEFT) * (iteration - first) / (last - first)
    )


def _drawable(points: Points) -> Points:
    return [(n, value if abs(value) >= TINY else 0.0) for n, value in points if is_number(value)]


def _words(label: str, points: Points, unit: str) -> str:
    """`training 0.1 to 0.8`."""
    first, last = number_text(points[0][1]), number_text(points[-1][1])
    return f"{label} {last}{unit}".strip() if _is_flat(points) else f"{label} {first} to {last}{unit}".strip()


def _is_flat(points: Points) -> bool:
    values = [value for _, value in points]
    return max(values) - min(values) <= SAME * max(map(abs, values))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the axis: it begins at zero unless all values are far from zero."""
    low, high = min(values), max(values)
    same = high - low <= SAME * max(abs(low), abs(high))
    if low >= 0 and (low < 0.6 * high or same):
        return 0.0, high or 1.0
    return (2 * low, 0.0) if same else (low, high)


def _iteration_ticks(first: int, last: int) -> list[int]:
    ticks = {round(tick) for tick in nice_ticks(first, last, 6, whole=True)} if last > first else {first}
    return sorted(tick for tick in ticks if first <= tick <= last)


def _stretches(points: Points) -> list[Points]:
    """Return the points in stretches of equally many neighbours."""
    size = math.ceil(len(points) / POINTS)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


SCALE = 1000.0
"""A timeline's width in its own units; the page stretches it."""
VISIBLE = 0.7
"""Narrower blocks are not drawn."""


@dataclass(frozen=True)
class Block:
    """A piece of a lane."""

    x: float
    width: float
    lane: int
    style: str
    """Its category, and `wait`, `broken` or `open`."""
    text: str


class NodeTitle(NamedTuple):
    """What a lane says of its node."""

    name: str
    """`rank 2`, `train rank 2`."""
    host: str

    @property
    def number(self) -> str:
        """The rank as a person types it."""
        return self.name.rpartition(" ")[2]


@dataclass(frozen=True)
class Lanes:
    """The timeline of a crew as drawn: a lane a node."""

    title: str
    seconds: float
    nodes: list[NodeTitle]
    lane_px: int
    blocks: list[Block]
    ticks: list[tuple[float, str]]
    """(percent of the width, text)."""
    marks: list[tuple[float, str]]
    """Where iterations begin, if there are several: (percent of the width, number)."""
    missing: list[str]
    """The numbers of nodes whose clock cannot be related to the master's."""
    crew: str = ""
    """Where there are two."""

    @property
    def height_px(self) -> int:
        return self.lane_px * len(self.nodes)

    @property
    def bar_px(self) -> int:
        return self.lane_px - (1 if self.lane_px < 12 else 4)


def lanes(timeline: Timeline, title: str, nodes: Mapping[int, NodeTitle], crew: str = "") -> Lanes:
    """Return the timeline of a crew. Lanes are thinner if there are more nodes. `nodes`: by rank."""
    ranks = sorted(timeline.bars)
    lane_px = 22 if len(ranks) <= 8 else 14 if len(ranks) <= 24 else 6
    scale = SCALE / max(timeline.seconds, 1e-6)
    blocks = [
        block
        for lane, rank in enumerate(ranks)
        for bar in timeline.bars[rank]
        for block in _blocks(bar, lane, scale, nodes[rank].name, bool(crew))
        if block.width >= VISIBLE
    ]
    ticks = [tick for tick in nice_ticks(0.0, timeline.seconds, 4) if tick <= 0.88 * timeline.seconds]
    return Lanes(
        title,
        timeline.seconds,
        [nodes[rank] for rank in ranks],
        lane_px,
        blocks,
        [(round(tick * scale / SCALE * 100, 2), f"{tick:g} s") for tick in ticks],
        _marks(timeline, scale) if crew else [],
        [nodes[rank].number for rank in ranks if not timeline.bars[rank]],
        crew,
    )


def _marks(timeline: Timeline, scale: float) -> list[tuple[float, str]]:
    """Say where each iteration of the master is, unless the numbers would cover each other."""
    begins: dict[int, float] = {}
    for bar in timeline.bars.get(MASTER, []):
        if bar.span.phase != IDLE:
            begins.setdefault(bar.span.iteration, bar.begin_s)
    marks: list[tuple[float, str]] = []
    for number, begin_s in sorted(begins.items()):
        percent = round(begin_s * scale / SCALE * 100, 2)
        if percent <= 94 and (not marks or percent - marks[-1][0] >= 6):
            marks.append((percent, str(number)))
    return marks


def _blocks(bar: Bar, lane: int, scale: float, name: str, several: bool) -> list[Block]:
    """Blocks for work, waiting, and the conclusion of the phase. A phase without an end is one block.

    `several`: the timeline shows more than one iteration.
    """
    span, category = bar.span, CATEGORIES.get(bar.span.phase, "other")
    seconds = bar.end_s - bar.begin_s
    phase = f"{span.phase}, iteration {span.iteration}" if several else span.phase

    def block(begin_s: float, end_s: float, style: str, note: str) -> Block:
        text = f"{name} {phase}: {note}"
        begin_s, end_s = min(begin_s, bar.end_s), min(end_s, bar.end_s)
        width = round((end_s - begin_s) * scale, 1)
        return Block(round(begin_s * scale, 1), width, lane, f"{category} {style}".strip(), text)

    if span.phase == IDLE:
        idle = block(bar.begin_s, bar.end_s, "", "")
        text = f"{name}: {span.wait_s:.1f} s of waiting for the other crew before iteration {span.iteration}"
        return [Block(idle.x, idle.width, lane, IDLE, text)]
    if span.state != "whole":
        ending = "broken off after" if span.state == "broken" else "so far"
        return [block(bar.begin_s, bar.end_s, span.state, f"{ending} {seconds:.1f} s")]
    lead_s = span.work_s - span.then_s
    loaded_s = bar.begin_s + min(span.load_s, lead_s)
    worked_s = min(bar.begin_s + lead_s, bar.end_s)
    waited_s = max(worked_s, bar.end_s - span.then_s)
    pieces = [block(loaded_s, worked_s, "", f"{lead_s:.1f} s of work")]
    if span.load_s:
        start = block(bar.begin_s, loaded_s, "", f"{span.load_s:.1f} s for the engine to start")
        pieces.insert(0, Block(start.x, start.width, lane, "load", start.text))
    pieces.append(block(worked_s, waited_s, "wait", f"{span.wait_s:.1f} s of waiting"))
    return [*pieces, block(waited_s, bar.end_s, "", f"{span.then_s:.1f} s of work to conclude it")]
