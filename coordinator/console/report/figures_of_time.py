"""Choose which iterations the timelines show, and compare two crews, from what the nodes have told."""

from collections.abc import Sequence
from typing import Any

from coordinator.console.report.crews import (
    CrewFigures,
    busy_s,
    idle_fraction,
    side_by_side,
    what_would_balance,
)
from coordinator.console.report.lanes import Lanes, NodeTitle, lanes
from coordinator.console.report.sources import CrewEvents, newest_record
from coordinator.console.report.timeline import Timelines
from coordinator.console.report.values import seconds_of
from coordinator.directory.layout import MASTER
from coordinator.protocol.placement_records import placed_crews, read_placement
from coordinator.settings.loading import flatten

SLOWEST = 2
"""How many of the slowest iterations are shown beside the last ones."""
HARDLY = 0.01
"""A crew that waited for less than this part of its time did not wait."""
TOGETHER = 3
"""How many iterations of the crew that trains are shown in a row, where another one generates."""


def timelines(
    crews: Sequence[CrewEvents], status: dict[str, Any], lines: Sequence[dict[str, Any]]
) -> list[list[Lanes]]:
    """Return the current iteration, the last finished one, and the slowest of the others; of two crews, the
    last iterations in one figure, a crew above the other.
    """
    running = status["state"] in {"running", "holding"}
    by_crew: list[Timelines] = []
    for crew, crew_status in zip(crews, status["crews"], strict=True):
        here_s = {rank: seconds_of(node, "row_s") for rank, node in enumerate(crew_status["nodes"])}
        by_crew.append(Timelines(crew.spans, here_s if running else {}))
    numbers = by_crew[-1].iterations
    if not numbers:  # those who train have to wait for the first groups
        crews, by_crew, numbers = crews[:1], by_crew[:1], by_crew[0].iterations
    finished = {line["iteration"] for line in lines}
    last = [number for number in numbers if number in finished][-1:]
    present = [number for number in numbers[-1:] if number not in finished]
    now = "going on" if running else "not finished"
    first: list[tuple[str, list[int]]] = []
    if len(crews) > 1:
        shown = numbers[-TOGETHER:]
        title = f"Iterations {shown[0]} to {shown[-1]} of the train crew" if len(shown) > 1 else ""
        title = title or f"Iteration {shown[0]} of the train crew"
        first = [(f"{title}, {now if present else 'the last ones'}", shown)]
    else:
        first = [(f"Iteration {number}, {now}", [number]) for number in present]
        first += [(f"Iteration {number}, the last that was finished", [number]) for number in last]
    unshown = set(numbers) - {number for _, shown in first for number in shown}
    slowest = sorted(unshown, key=by_crew[-1].seconds, reverse=True)[:SLOWEST]
    figures = [*first, *((f"Iteration {number}, among the slowest", [number]) for number in slowest)]
    if len(crews) > 1:
        return [_of_both(crews, by_crew, title, shown) for title, shown in figures]
    return [
        [lanes(by_crew[0].timeline_of(number), title, _nodes(crews[0]), crews[0].crew)]
        for title, (number,) in figures
    ]


def _of_both(
    crews: Sequence[CrewEvents], by_crew: Sequence[Timelines], title: str, shown: list[int]
) -> list[Lanes]:
    idle = [idle_fraction(crew.spans.values()) for crew in crews]
    # Where nobody waits, the one that trains has waited for the first groups.
    trusted = "rollout" if idle[0] > max(idle[1], HARDLY) else "train"
    timelines = side_by_side(by_crew[0], by_crew[1], shown, _level(crews), trusted)
    return [
        lanes(timeline, title, _nodes(crew), crew.crew)
        for timeline, crew in zip(timelines, crews, strict=True)
    ]


def _nodes(crew: CrewEvents) -> dict[int, NodeTitle]:
    return {rank: NodeTitle(crew.run_dir.name(rank), host) for rank, host in crew.hosts.items()}


def _level(crews: Sequence[CrewEvents]) -> int:
    """Return cluster.max_async_level."""
    record = newest_record(crews[-1].run_dir)
    return dict(flatten(record.settings)).get("cluster.max_async_level", 0) if record else 0


def comparison(crews: Sequence[CrewEvents]) -> list[str]:
    """Say for how much of its time each of two crews waited for the other, and what would balance them."""
    if len(crews) == 1:
        return []
    idle = [idle_fraction(crew.spans.values()) for crew in crews]
    sentences = [
        f"From its first iteration to its last, the rollout crew waited for the train crew for "
        f"{100 * idle[0]:.0f} % of the time, the train crew for the rollout crew for {100 * idle[1]:.0f} %."
    ]
    root = crews[0].run_dir.root
    placed = placed_crews(root, read_placement(root))
    assert placed is not None, "there are two crews"
    rollout, train = (
        (busy_s(crew.spans.get(MASTER, [])), sum(len(place.devices) for place in placed[crew.run_dir.crew]))
        for crew in crews
    )
    if rollout[0] is not None and train[0] is not None:
        sentences.append(
            what_would_balance(
                CrewFigures(rollout[0], rollout[1]), CrewFigures(train[0], train[1]), _level(crews)
            )
        )
    return sentences
