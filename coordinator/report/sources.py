"""What the page is made from, as read from the run directory: events, the newest epoch's record."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import outputs
from coordinator.board import parse
from coordinator.epochs import EpochRecord, Records
from coordinator.run_dir import RunDir

Line = dict[str, Any]
"""An event; `t`, `n`, `e` and `what` are there, and `it` and `row` in a `begin` or `end`."""

BUDGET_BYTES = 48_000_000
"""Of the events of all nodes together so much is read whole; of what is older, the rows are skipped."""
TOGETHER = 1024
"""So many lines are parsed at a time."""


@dataclass(frozen=True)
class Events:
    """By rank, the events in the order of its file."""

    lines: dict[int, list[Line]]
    whole: bool
    """False: the files are long, and older iterations' rows were skipped (all other events are there)."""


def read_events(run_dir: RunDir, budget_bytes: int = BUDGET_BYTES) -> Events:
    """The events of every rank that has some; lines that are torn or not events are left out."""
    directory = run_dir.events(0).parent
    ranks = {
        rank: path for name in outputs.names(directory) if (rank := _rank(path := directory / name)) >= 0
    }
    lines: dict[int, list[Line]] = {}
    whole = True
    for rank, path in sorted(ranks.items()):
        try:
            skip = path.stat().st_size - budget_bytes // len(ranks)
            lines[rank] = list(_events(path, skip))
        except FileNotFoundError:
            continue
        whole = whole and skip <= 0
    return Events({rank: found for rank, found in lines.items() if found}, whole)


def _rank(path: Path) -> int:
    """Of `rank_0001.jsonl`; -1 for another name."""
    number = path.stem.removeprefix("rank_")
    return int(number) if path.suffix == ".jsonl" and number.isascii() and number.isdecimal() else -1


def _events(path: Path, skip: int) -> Iterator[Line]:
    """The events of a file; of its first `skip` bytes those that are not rows."""
    place = 0
    texts: list[str] = []
    with path.open("rb") as file:
        for text in file:
            place += len(text)
            if text.startswith(b"{") and (place > skip or b'"row"' not in text):
                texts.append(text.decode("utf-8", "replace"))
    for start in range(0, len(texts), TOGETHER):
        yield from filter(is_event, _parsed(texts[start : start + TOGETHER]))


def _parsed(texts: list[str]) -> list[Any]:
    """What the lines say; those that are torn are left out."""
    try:
        found = json.loads(f"[{','.join(texts)}]")  # many together take half the time
        if len(found) == len(texts):
            return found
    except ValueError:
        pass
    if len(texts) <= 1:
        return []
    middle = len(texts) // 2
    return _parsed(texts[:middle]) + _parsed(texts[middle:])


def is_event(line: Any) -> bool:
    """Whether it has what every event has."""
    try:
        whole = line["t"] + line["n"] + line["e"] >= 0 and isinstance(line["what"], str)
        if line["what"] in {"begin", "end"}:
            whole = whole and line["it"] >= 0 and isinstance(line["row"], str)
        return whole and (line["what"] != "end" or line["work_s"] >= 0.0)
    except (TypeError, KeyError):
        return False


def newest_record(run_dir: RunDir) -> EpochRecord | None:
    """The current epoch's record: its settings and members."""
    return Records(run_dir).newest(parse(outputs.names(run_dir.protocol)).records)
