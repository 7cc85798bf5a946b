"""List what went wrong in a run and how it went on, from the events. Pure."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.console.report.values import duration, seconds_of
from coordinator.directory.layout import MASTER
from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import ranks_text

Line = Mapping[str, Any]

SHOWN = 150
"""How many faults the page shows: the last ones."""
AGAIN = "started again"
_PHASES = {phase.label: int(phase) for phase in Phase}


@dataclass(frozen=True)
class Fault:
    """A line of the table of faults."""

    epoch: int
    iteration: int
    """Its iteration; 0 before the first one."""
    phase: str
    rank: int
    host: str
    kind: str
    """lost, error, warning, started again, changed (a setting), new epoch, ended."""
    text: str
    times: int = 1
    until: int = 0
    """The iteration of the last time, if there were several."""
    went_on_s: float | None = None
    """Seconds until this node began a phase in a newer epoch. None if it did not stop, or did not go on."""
    crew: str = ""
    """The node's crew, where there are two."""


@dataclass(frozen=True)
class Retries:
    """Calls on the shared directory that failed and then worked."""

    rank: int
    host: str
    times: int
    seconds: float
    text: str
    """The text of the last one."""
    crew: str = ""
    """The node's crew, where there are two."""


def faults_of(rank: int, lines: Sequence[Line]) -> list[Fault]:
    """Return the faults in a rank's events, in order."""
    faults: list[Fault] = []
    host, place, processes, epochs = "", (0, ""), 0, 0
    went_on, entered = _went_on(lines), _entered(lines)
    for index, line in enumerate(lines):
        event, text = line["what"], str(line.get("text", ""))
        if event in {"begin", "end"}:
            place = (line["it"], line["row"])
            continue
        kind = ""
        if event == "process":
            away_text = _away(lines[index - 1], line) if index and host == line.get("host") else ""
            host, processes = str(line.get("host", "")), processes + 1
            kind = AGAIN if processes > 1 else ""
            text = f"process {processes} of this rank, from {str(line.get('at', ''))[:19]}{away_text}"
        elif event == "epoch" and rank == MASTER:
            epochs += 1
            kind = "new epoch" if epochs > 1 else ""
            text = f"epoch {line['e']} begins with {_ranks(line.get('members', []))}"
        elif event == "exit" and line.get("code") not in (0, None):
            kind, text = "ended", f"exit code {line['code']}: {text}"
        elif event in {"lost", "error", "warning", "changed"}:
            kind = event
        if kind:
            stopped = kind not in {"warning", "changed", "new epoch"}
            whom = line["rank"] if event == "lost" and isinstance(line.get("rank"), int) else rank
            seconds = went_on[index] if stopped else None
            epoch = entered[index] if kind == AGAIN else line["e"]
            faults.append(Fault(epoch, *place, whom, host, kind, text, went_on_s=seconds))
    return faults


def _away(last: Line, first: Line) -> str:
    """Return for how long a rank was away, of two lines by one clock; empty if the machine was off."""
    seconds = first["t"] - last["t"]
    return f", {duration(seconds)} after the last event of the one before" if seconds >= 0 else ""


def _entered(lines: Sequence[Line]) -> list[int]:
    """For each line, the epoch that is entered next; where none is, one more than the last."""
    epoch = max((line["e"] for line in lines), default=0) + 1
    epochs: list[int] = []
    for line in reversed(lines):
        epoch = line["e"] if line["what"] == "epoch" else epoch
        epochs.append(epoch)
    return epochs[::-1]


def _went_on(lines: Sequence[Line]) -> list[float | None]:
    """For each line, seconds until the rank's next phase, if in a newer epoch and on the same clock."""
    hosts = list(itertools.accumulate(lines, _host_after, initial=""))[1:]
    result: list[float | None] = [None] * len(lines)
    begun: Line | None = None
    begun_on = ""
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if line["what"] == "begin":
            begun, begun_on = line, hosts[index]
        elif begun is not None and begun_on == hosts[index] and begun["e"] > line["e"]:
            result[index] = begun["t"] - line["t"] if begun["t"] >= line["t"] else None
    return result


def _host_after(host: str, line: Line) -> str:
    return str(line.get("host", "")) if line["what"] == "process" else host


def all_faults(lines: Mapping[int, Sequence[Line]]) -> list[Fault]:
    """Return the faults of all ranks, in order. Warnings that differ only in numbers are one fault."""
    hosts = {rank: host_of(events) for rank, events in lines.items()}
    faults = [
        replace(fault, host=hosts.get(fault.rank, "")) if fault.kind == "lost" else fault
        for rank, events in lines.items()
        for fault in faults_of(rank, events)
    ]
    # A process that has started again comes before what happens in the epoch that it enters.
    faults.sort(
        key=lambda fault: (fault.epoch, fault.kind != AGAIN, fault.iteration, _PHASES.get(fault.phase, 0))
    )
    lost = {_without_numbers(fault.text) for fault in faults if fault.kind == "lost"}
    merged: dict[object, Fault] = {}
    for fault in faults:
        key: object = fault
        if fault.kind == "warning":
            key = (fault.rank, _without_numbers(fault.text))
        if fault.kind == "lost":
            fault = replace(fault, text=fault.text.partition(". To ")[0])
        elif _without_numbers(fault.text).removeprefix("holding: ") in lost:
            continue  # the master has said it while its phase went on; every worker says it again
        first = merged.setdefault(key, fault)
        if first is not fault:
            merged[key] = replace(first, times=first.times + 1, until=fault.iteration)
    return list(merged.values())


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def retries(lines: Mapping[int, Sequence[Line]]) -> list[Retries]:
    """Return the calls that had to be repeated, by rank."""
    by_rank: list[Retries] = []
    for rank, events in sorted(lines.items()):
        calls = [line for line in events if line["what"] == "retry"]
        if calls:
            seconds = sum(seconds_of(line, "seconds") for line in calls)
            by_rank.append(
                Retries(rank, host_of(events), len(calls), seconds, str(calls[-1].get("text", "")))
            )
    return by_rank


def host_of(lines: Sequence[Line]) -> str:
    """Return the host of the newest process of a rank."""
    return next((str(line.get("host", "")) for line in reversed(lines) if line["what"] == "process"), "")


def _ranks(members: Any) -> str:
    """`rank 0`, `ranks 0, 1, 2`, `64 nodes`."""
    if not isinstance(members, list):
        return "its members"
    ranks = [rank for rank in members if isinstance(rank, int)]  # pyright: ignore[reportUnknownVariableType]
    if not ranks:
        return "its members"
    return ranks_text(ranks) if len(ranks) <= 8 else f"{len(ranks)} nodes"
