"""Read the sources of the page: the events, and the newest epoch's record."""

import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.console.report.faults import host_of
from coordinator.console.report.timeline import Span, spans_of, with_idle
from coordinator.console.views.heartbeats import is_number
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import whole_board
from rollout.storage.retry import retry

Line = dict[str, Any]
"""An event. It has `t`, `n`, `e` and `what`; a `begin` or `end` also has `it` and `row`, its phase."""

BUDGET_BYTES = 48_000_000
"""How many bytes of the events of all nodes are read whole. Of older events the phases are skipped."""
TOGETHER = 1024
"""How many lines are parsed at a time."""


@dataclass(frozen=True)
class EventLines:
    """By rank, the events in the order of the file."""

    lines: dict[int, list[Line]]
    skipped: bool
    """Whether the files are long and the phases of older iterations were skipped."""
    unreadable: list[str]
    """The names of files that could not be read."""


class CrewEvents(NamedTuple):
    """What the nodes of a crew have told of their time."""

    run_dir: RunDir
    events: EventLines
    spans: dict[int, list[Span]]
    """By rank."""

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that was ever in the crew."""
        return {rank: host_of(events) for rank, events in self.events.lines.items()}

    @property
    def crew(self) -> str:
        """Its name where there are two; else an empty text."""
        return "" if self.run_dir.crew == "main" else self.run_dir.crew


def read_crews(run_dirs: Sequence[RunDir]) -> list[CrewEvents]:
    """Read what the nodes of each crew have told."""
    crews: list[CrewEvents] = []
    for run_dir in run_dirs:
        events = read_events(run_dir, BUDGET_BYTES // len(run_dirs))
        spans = {rank: spans_of(rank, lines) for rank, lines in events.lines.items()}
        if len(run_dirs) > 1:
            spans = {rank: with_idle(node_spans) for rank, node_spans in spans.items()}
        crews.append(CrewEvents(run_dir, events, spans))
    return crews


def read_events(run_dir: RunDir, budget_bytes: int = BUDGET_BYTES) -> EventLines:
    """Read the events of all ranks of a crew. Lines that are torn or no events are left out."""
    directory = run_dir.events(0).parent
    try:
        names = published.names(directory)
    except OSError:
        return EventLines({}, False, [directory.name])
    of_nodes = [Path(name).stem for name in names if name.endswith(".jsonl")]
    ranks = {rank: run_dir.events(rank) for name in of_nodes if (rank := run_dir.rank_of(name)) is not None}
    lines: dict[int, list[Line]] = {}
    unreadable: list[str] = []
    skipped = False
    for rank, path in sorted(ranks.items()):
        try:
            texts, all_of_it = _texts(path, budget_bytes // len(ranks))
        except OSError:
            unreadable.append(path.name)
            continue
        skipped = skipped or not all_of_it
        if events := list(_events(texts)):
            lines[rank] = events
    return EventLines(lines, skipped, unreadable)


def _texts(path: Path, budget_bytes: int) -> tuple[list[str], bool]:
    """Return the lines of a file that may be events, and whether these are all: before the last
    `budget_bytes`, lines with phases are left out. Raises OSError if it cannot be read, or is no file.
    """

    def read() -> tuple[list[str], bool]:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # opening a pipe waits for its writer
            raise OSError(f"{path} is not a file")
        skip, place = facts.st_size - budget_bytes, 0
        texts: list[str] = []
        with path.open("rb") as file:
            for text in file:
                place += len(text)
                if text.startswith(b"{") and (place > skip or b'"row"' not in text):
                    texts.append(text.decode("utf-8", "replace"))
        return texts, skip <= 0

    return retry("read", path, read)


def _events(texts: list[str]) -> Iterator[Line]:
    """Yield the events in the lines."""
    for start in range(0, len(texts), TOGETHER):
        yield from filter(is_event, _parsed(texts[start : start + TOGETHER]))


def _parsed(texts: list[str]) -> list[Any]:
    """Return the parsed lines, without torn ones."""
    try:
        parsed = json.loads(f"[{','.join(texts)}]")  # parsing many together takes half the time
        if len(parsed) == len(texts):
            return parsed
    except ValueError:
        pass
    if len(texts) <= 1:
        return []
    middle = len(texts) // 2
    return _parsed(texts[:middle]) + _parsed(texts[middle:])


def is_event(line: Any) -> bool:
    """Return whether a line has the fields of an event."""
    try:
        valid = all(is_number(line[name]) for name in ("t", "n", "e")) and isinstance(line["what"], str)
        if line["what"] in {"begin", "end"}:
            valid = valid and isinstance(line["it"], int) and line["it"] >= 0 and isinstance(line["row"], str)
        return valid and (line["what"] != "end" or (is_number(line["work_s"]) and line["work_s"] >= 0.0))
    except (TypeError, KeyError):
        return False


def newest_record(run_dir: RunDir) -> EpochRecord | None:
    """Return the current epoch's record, with settings and members."""
    return Records(run_dir).newest(whole_board(run_dir, published.names).records)
