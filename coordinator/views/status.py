"""Read the state of a run from its directory; any process may do so at any time, and nothing is written."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from coordinator.directory import published
from coordinator.directory.layout import FORMAT, MASTER, Beat, RunDir
from coordinator.directory.metrics_file import MetricsFile
from coordinator.machine.network import pid_space
from coordinator.protocol.complaints import NOT_STARTED, read_complaint
from coordinator.protocol.liveness import Silence
from coordinator.protocol.phases import Phase, rows_of
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, whole_board
from coordinator.protocol.watch import ENDED
from coordinator.settings import RunSettings, SettingsError
from coordinator.views.beats import said_in
from rollout.storage import files

ROLLOUTS = {Phase.TRAIN_ROLLOUT.label, Phase.EVAL_ROLLOUT.label}
ROWS: dict[str, Phase] = {phase.label: phase for phase in Phase}
GOING = {"running", "holding"}
"""States of a run that works, or waits for nodes."""
NEW_ROW: dict[str, Any] = {
    "state": "running",
    "done": 0,
    "total": 0,
    "waiting_for": [],
    "row_s": 0.0,
    "waiting_s": 0.0,
    "tokens_per_s": None,
    "left_s": None,
}
"""What is known of a node in a row of which its heartbeat does not tell yet."""

Place = tuple[int, int]
"""Iteration and row."""

Said = Mapping[int, dict[str, Any]]
"""By rank, the content of the newest heartbeat."""


class StatusReader:
    """Read the state of one run repeatedly; what does not change is read once. For one thread.

    Between readings it measures by its own clock how long each heartbeat has not changed. Only so does it
    notice that a master on another machine was killed.
    """

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir(root)
        self.lines: list[dict[str, Any]] = []
        """The lines of metrics.jsonl at the last reading."""
        self._run_id = ""
        self._records = Records(self.run_dir)
        self._silence: Silence | None = None
        self._first_beats: dict[int, Beat] = {}
        """The heartbeat of each rank that was read here first."""
        self._place: tuple[Any, ...] | None = None
        self._metrics = MetricsFile(self.run_dir)

    def open(self) -> None:
        """Raise SettingsError if there is no run, or a run of another format."""
        if self._run_id:
            return
        root = self.run_dir.root
        is_there = root.is_dir() and self.run_dir.run_json.name in files.file_names(root)
        run = published.read_json(self.run_dir.run_json) if is_there else None
        if run is None:
            raise SettingsError(f"--log-path {root}: no run there (no run.json that can be read)")
        if run.get("format") != FORMAT:
            found = run.get("format")
            raise SettingsError(f"--log-path {root}: a run of format {found}; this version reads {FORMAT}")
        self._run_id = str(run.get("run_id"))

    def read(self) -> dict[str, Any]:
        """Return the state as `run status --json` prints it; SettingsError if there is no run,
        SharedFsError."""
        self.open()
        board = whole_board(self.run_dir, _names)
        record = self._records.newest(board.records)
        said: Said = {rank: said_in(self.run_dir, beat) for rank, beat in board.beats.items()}
        settings = RunSettings.published(record.settings) if record else RunSettings()
        still_s = self._observe(board, settings)
        timeout_s = settings.cluster.node_timeout_s
        ended = {rank for rank, content in said.items() if _is_gone(content)}
        gone = ended | {rank for rank in said if still_s.get(rank, 0.0) >= timeout_s}
        silent_s = _silent_s(said, ended, still_s, settings.cluster.beat_interval_s)
        # What was seen to change here needs nobody else's observation.
        changed = {rank for rank, beat in board.beats.items() if beat != self._first_beats.get(rank)}
        silent_s |= {rank: still_s[rank] for rank in changed - ended if rank in still_s}
        if record is not None:
            said = _with_flags(board, record, settings, said, gone)
        self._read_metrics(said.get(MASTER, {}))
        return self._describe(board, record, settings, said, gone, silent_s)

    def _read_metrics(self, master: Mapping[str, Any]) -> None:
        """Read metrics.jsonl unless it cannot have a new line: the master writes one in an iteration's last
        row."""
        place = tuple(master.get(name) for name in ("pid", "state", "iteration", "phase"))
        if place != self._place or place[-1] in {None, Phase.ITERATION_END.label}:
            is_there = self.run_dir.metrics.name in files.file_names(self.run_dir.root)
            self.lines = self._metrics.read() if is_there else []
        self._place = place

    def _observe(self, board: Board, settings: RunSettings) -> dict[int, float]:
        """Return for how many seconds each rank's heartbeat has not changed since it was first read here."""
        if self._silence is None:
            self._silence = Silence(max(settings.cluster.beat_interval_s, 1.0))  # readings are seconds apart
        self._silence.observe(board, board.beats, time.monotonic())
        for rank, beat in board.beats.items():
            self._first_beats.setdefault(rank, beat)
        return {rank: round(seconds, 1) for rank, seconds in self._silence.silent_s.items()}

    def _describe(
        self,
        board: Board,
        record: EpochRecord | None,
        settings: RunSettings,
        said: Said,
        gone: set[int],
        silent_s: Mapping[int, float],
    ) -> dict[str, Any]:
        master = said.get(MASTER, {})
        phase = master.get("phase", "") or master.get("state", "")
        state = _state(board, record, said, gone)
        waiting_for = [MASTER] if MASTER in gone else master.get("waiting_for", [])
        ranks = range(settings.cluster.num_nodes)
        nodes = [_node(rank, settings, board, record, said, gone, silent_s.get(rank, 0.0)) for rank in ranks]
        self._add_complaints(nodes, board, record)
        left_s = [node["left_s"] for node in nodes if node["left_s"] is not None and node["phase"] == phase]
        waiting_s = silent_s.get(MASTER, 0.0) if MASTER in gone else master.get("waiting_s", 0.0)
        return {
            "run_id": self._run_id,
            "state": state,
            "epoch": record.epoch if record else 0,
            "iteration": master.get("iteration") or self._last_iteration(board),
            "iterations": settings.iterations,
            "phase": phase,
            "waiting_for": waiting_for if state in GOING else [],
            "waiting_s": float(waiting_s) if state in GOING else 0.0,
            "rollout_left_s": max(left_s, default=None) if phase in ROLLOUTS else None,
            "num_nodes": settings.cluster.num_nodes,
            "nodes": nodes,
            "last_metrics": self.lines[-1] if self.lines else None,
        }

    def _add_complaints(self, nodes: list[dict[str, Any]], board: Board, record: EpochRecord | None) -> None:
        """Add to the nodes that do not take part why they do not come, as far as they have said it."""
        calls = board.called(record.epoch, NOT_STARTED) if record else []
        for node in nodes:
            flags = [flag for flag in calls if flag.rank == node["rank"] and node["state"] != "alive"]
            found = read_complaint(self.run_dir, flags[0]) if flags else None
            host, node["error"] = found or (node["host"], "")
            node["host"] = node["host"] or host

    def _last_iteration(self, board: Board) -> int:
        """Return the newest iteration that has a flag or a line: for a master that has been in none yet."""
        flagged = (flag.iteration for flag in board.flags)
        return max(*flagged, *(line["iteration"] for line in self.lines[-1:]), 0, 0)


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
    here = "pid" in content and content.get("pid_space") == pid_space()
    return content.get("state") == ENDED or (here and not psutil.pid_exists(content["pid"]))


def _age_s(content: Mapping[str, Any]) -> float | None:
    """Return how old what a node says is; None if its clock is another machine's."""
    if "monotonic_s" not in content or content.get("pid_space") != pid_space():
        return None
    return max(0.0, time.monotonic() - content["monotonic_s"])


def _silent_s(said: Said, ended: set[int], still_s: Mapping[int, float], beat_s: float) -> dict[int, float]:
    """Seconds of silence by rank: the larger of what the master last observed, up to now, and our own.

    `ended`: ranks of which it is known that their process has ended.
    """
    observed: dict[int, float] = said.get(MASTER, {}).get("silent_s", {})
    since_s = min(_age_s(said.get(MASTER, {})) or 0.0, 2 * beat_s)
    found: dict[int, float] = {}
    for rank in {*observed, *still_s}:
        content = said.get(rank, {})
        seconds = observed[rank] + since_s if rank in observed else 0.0
        if (age_s := _age_s(content)) is not None:
            seconds = age_s if rank in ended else min(seconds, age_s)
        own_s = 0.0 if content.get("state") == ENDED else still_s.get(rank, 0.0)
        found[rank] = round(max(seconds, own_s), 1)
    return found


def _with_flags(board: Board, record: EpochRecord, settings: RunSettings, said: Said, gone: set[int]) -> Said:
    """Return what the nodes say, in the rows that their flags show: heartbeats are up to seconds older."""
    reached: dict[int, Place] = {}
    for flag in board.flags:
        if flag.epoch == record.epoch and flag.kind == "ok" and flag.phase in ROWS.values():
            place = (flag.iteration, flag.phase)
            reached[flag.rank] = max(place, reached.get(flag.rank, place))
    if MASTER in reached:
        reached[MASTER] = _after(reached[MASTER], settings)
        for rank in record.members.keys() - gone:
            reached[rank] = max(reached[MASTER], reached.get(rank, reached[MASTER]))
    found = dict(said)
    for rank, (iteration, row) in reached.items():
        content = said.get(rank, {})
        place = (content.get("iteration", 0), ROWS.get(content.get("phase", ""), -1))
        is_newer = content.get("state") == "running" and (iteration, row) > place
        if rank in said and (is_newer or board.beats[rank].epoch < record.epoch):
            found[rank] = {**content, **NEW_ROW, "iteration": iteration, "phase": Phase(row).label}
    return found


def _after(place: Place, settings: RunSettings) -> Place:
    """Return the row after one that is over; the last row of the run has none."""
    iteration, row = place
    later = [phase for phase in rows_of(settings.kind) if phase > row]
    if later:
        return iteration, min(later)
    return place if iteration == settings.iterations else (iteration + 1, Phase.ITERATION_START)


def _state(board: Board, record: EpochRecord | None, said: Said, gone: set[int]) -> str:
    if record is None:  # its master has just started, or ended before it was in an epoch
        return "holding" if said.keys() - gone else "stopped"
    if record.kind == "finished":
        return "finished"
    calls = {(flag.kind, flag.rank == MASTER) for flag in board.calls if flag.epoch == record.epoch}
    if ("left", True) in calls or {kind for kind, _ in calls} & {"failed", "gave_up", "stopped"}:
        return "stopped"
    if MASTER in gone:  # its workers wait for it, unless they are known to have ended too
        held = (said.keys() & record.members.keys()) - gone
        return "holding" if held else "stopped"
    return "holding" if record.kind == "lobby" or ("lost", True) in calls else "running"


def _node(
    rank: int,
    settings: RunSettings,
    board: Board,
    record: EpochRecord | None,
    said: Said,
    gone: set[int],
    silent_s: float,
) -> dict[str, Any]:
    """Describe a node by its last heartbeat and by what the master last observed."""
    content = said.get(rank, {})
    member = record.members.get(rank) if record else None
    left = record is not None and any(flag.rank == rank for flag in board.called(record.epoch, "left"))
    state = "alive"
    if rank not in board.beats:
        state = "never_seen"
    elif left or content.get("state") == ENDED:
        state = "left"
    elif silent_s >= settings.cluster.node_timeout_s or rank in gone:
        state = "silent"
    return {
        "rank": rank,
        "host": content.get("host", member.host if member else ""),
        "address": member.address if member else content.get("address", ""),
        "state": state,
        "iteration": content.get("iteration", 0),
        "phase": content.get("phase", "") or content.get("state", ""),
        "row_s": content.get("row_s", 0.0),
        "waiting_s": content.get("waiting_s", 0.0),
        "weight": member.weight if member else settings.cluster.weight(rank),
        "tasks_assigned": content.get("total", 0),
        "tasks_done": content.get("done", 0),
        "tokens_per_s": content.get("tokens_per_s"),
        "left_s": content.get("left_s"),
        "gpu_count": content.get("gpu_count", 0),
        "gpus": content.get("gpus", []),
        "silent_s": silent_s,
    }
