"""Compute the geometry of the page's line charts, which the template draws as SVG. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.console.views.heartbeats import is_number

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
    """The fork of a forked run: the x up to which the lines are those of the run that it comes from, and the
    iteration at which it was forked.
    """

    def forked_at(self, iteration: int) -> "Chart":
        """Return the chart of a run that was forked at this iteration."""
        if not self.first < iteration <= self.last:
            return self
        place = round(_x(iteration - 0.5, self.first, self.last), 1)
        return replace(self, fork=(place, iteration))


def nice_ticks(low: float, high: float, count: int, integers: bool = False) -> list[float]:
    """Round numbers in about `count` steps, the first <= low, the last >= high; `integers`: integers."""
    span = high - low or abs(high) or 1.0
    rough = max(span / count, 1.0) if integers else span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor
        for factor in ((1, 2, 5, 10) if integers else (1, 2, 2.5, 5, 10))
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
    ticks = {round(tick) for tick in nice_ticks(first, last, 6, integers=True)} if last > first else {first}
    return sorted(tick for tick in ticks if first <= tick <= last)


def _stretches(points: Points) -> list[Points]:
    """Return the points in stretches of equally many neighbours."""
    size = math.ceil(len(points) / POINTS)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
