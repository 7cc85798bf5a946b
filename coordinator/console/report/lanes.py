"""Compute the geometry of the page's timelines, a lane a node, which the template draws as SVG. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.console.report.charts import nice_ticks
from coordinator.console.report.timeline import CATEGORIES, IDLE, Bar, Timeline
from coordinator.directory.layout import MASTER

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
    """The crew's name, where there are two."""

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
