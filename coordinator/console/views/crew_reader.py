"""Read what the nodes of one crew show in protocol/, again and again; nothing is written."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from coordinator.console.views.crew_status import CrewSnapshot, Said
from coordinator.console.views.heartbeats import heartbeat_values
from coordinator.directory.file_names import Beat
from coordinator.directory.layout import MASTER, RunDir
from coordinator.machine.network import pid_space
from coordinator.protocol.liveness import Silence
from coordinator.protocol.phase import Phase, phases_of
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, whole_board
from coordinator.protocol.verdict import has_left
from coordinator.protocol.watch import ENDED
from coordinator.settings.tree import RunSettings
from rollout.storage import files

PHASES: dict[str, Phase] = {phase.label: phase for phase in Phase}
NEW_PHASE: dict[str, Any] = {
    "state": "running",
    "done": 0,
    "total": 0,
    "samples": 0,
    "samples_total": 0,
    "waiting_for": [],
    "waits_for": "",
    "row_s": 0.0,
    "waiting_s": 0.0,
    "tokens_per_s": None,
    "left_s": None,
}
"""What is known of a node in a phase of which its heartbeat does not tell yet."""

Place = tuple[int, int]
"""Iteration and phase."""


class CrewReader:
    """Look at one crew repeatedly; what does not change is read once. For one thread."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._records = Records(run_dir)
        self._silence: Silence | None = None
        self._first_beats: dict[int, Beat] = {}
        """The heartbeat of each rank that was read here first."""

    def look(self) -> CrewSnapshot:
        """Return the crew as it shows itself now."""
        board = whole_board(self.run_dir, _names)
        record = self._records.newest(board.records)
        contents: Said = {rank: heartbeat_values(self.run_dir, beat) for rank, beat in board.beats.items()}
        settings = RunSettings.published(record.settings) if record else RunSettings()
        settings = settings.of_crew(self.run_dir.crew)
        still_s = self._observe(board, settings)
        timeout_s = settings.cluster.node_timeout_s
        ended = {rank for rank, content in contents.items() if _is_gone(content)}
        dead = ended | {rank for rank in contents if still_s.get(rank, 0.0) >= timeout_s}
        dead |= {rank for rank in contents if has_left(board, record, rank)}
        silent_s = _silent_s(contents, ended, still_s, settings.cluster.beat_interval_s)
        # What was seen to change here needs nobody else's observation.
        changed = {rank for rank, beat in board.beats.items() if beat != self._first_beats.get(rank)}
        silent_s |= {rank: still_s[rank] for rank in changed - ended if rank in still_s}
        if record is not None:
            contents = _with_flags(board, record, settings, contents, dead)
        return CrewSnapshot(self.run_dir, board, record, settings, contents, dead, silent_s)

    def _observe(self, board: Board, settings: RunSettings) -> dict[int, float]:
        """Return for how many seconds each rank's heartbeat has not changed since it was first read here."""
        if self._silence is None:
            self._silence = Silence(max(settings.cluster.beat_interval_s, 1.0))  # readings are seconds apart
        self._silence.observe(board, board.beats, time.monotonic())
        for rank, beat in board.beats.items():
            self._first_beats.setdefault(rank, beat)
        return {rank: round(seconds, 1) for rank, seconds in self._silence.silent_s.items()}


def _names(directory: Path) -> list[str]:
    """Return the names of the files in a directory: whoever opens a pipe of such a name waits for ever."""
    try:
        return files.file_names(directory)
    except FileNotFoundError:
        return []


def _is_gone(content: Mapping[str, Any]) -> bool:
    """Return whether a process is known to have ended; of a process that another machine or container counts,
    only its own word says so.
    """
    is_here = "pid" in content and content.get("pid_space") == pid_space()
    return content.get("state") == ENDED or (is_here and not psutil.pid_exists(content["pid"]))


def _age_s(content: Mapping[str, Any]) -> float | None:
    """Return how old what a node says is; None if its clock is another machine's."""
    if "monotonic_s" not in content or content.get("pid_space") != pid_space():
        return None
    return max(0.0, time.monotonic() - content["monotonic_s"])


def _silent_s(
    contents: Said, ended: set[int], still_s: Mapping[int, float], beat_s: float
) -> dict[int, float]:
    """Seconds of silence by rank: the larger of what the master last observed, up to now, and our own.

    `ended`: ranks of which it is known that their process has ended.
    """
    observed: dict[int, float] = contents.get(MASTER, {}).get("silent_s", {})
    since_s = min(_age_s(contents.get(MASTER, {})) or 0.0, 2 * beat_s)
    silences: dict[int, float] = {}
    for rank in {*observed, *still_s}:
        content = contents.get(rank, {})
        seconds = observed[rank] + since_s if rank in observed else 0.0
        if (age_s := _age_s(content)) is not None:
            seconds = age_s if rank in ended else min(seconds, age_s)
        own_s = 0.0 if content.get("state") == ENDED else still_s.get(rank, 0.0)
        silences[rank] = round(max(seconds, own_s), 1)
    return silences


def _with_flags(
    board: Board, record: EpochRecord, settings: RunSettings, contents: Said, dead: set[int]
) -> Said:
    """Return the nodes' contents in the phases that their flags show: heartbeats are up to seconds older."""
    reached: dict[int, Place] = {}
    for flag in board.flags:
        if flag.epoch == record.epoch and flag.is_done and flag.phase in PHASES.values():
            place = (flag.iteration, flag.phase)
            reached[flag.rank] = max(place, reached.get(flag.rank, place))
    if MASTER in reached:
        reached[MASTER] = _after(reached[MASTER], settings)
        for rank in record.members.keys() - dead:
            reached[rank] = max(reached[MASTER], reached.get(rank, reached[MASTER]))
    updated = dict(contents)
    for rank, (iteration, phase) in reached.items():
        content = contents.get(rank, {})
        place = (content.get("iteration", 0), PHASES.get(content.get("phase", ""), -1))
        is_newer = content.get("state") == "running" and (iteration, phase) > place
        if rank in contents and (is_newer or board.beats[rank].epoch < record.epoch):
            # Between two iterations its heartbeat says what it waits for.
            waits = content.get("waits_for") and Phase(phase) is Phase.ITERATION_START
            new = {} if waits else NEW_PHASE
            updated[rank] = {**content, **new, "iteration": iteration, "phase": Phase(phase).label}
    return updated


def _after(place: Place, settings: RunSettings) -> Place:
    """Return the phase after one that is over; the last phase of the run has none."""
    iteration, ended = place
    later = [phase for phase in phases_of(settings.kind) if phase > ended]
    if later:
        return iteration, min(later)
    return place if iteration == settings.iterations else (iteration + 1, Phase.ITERATION_START)
