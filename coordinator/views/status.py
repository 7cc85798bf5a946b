"""Read the state of a run from its directory; any process may do so at any time, and nothing is written."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from coordinator.directory import published
from coordinator.directory.layout import FORMAT, MASTER, RunDir
from coordinator.directory.metrics_file import MetricsFile
from coordinator.machine.network import pid_space
from coordinator.protocol.complaints import NOT_STARTED, read_complaint
from coordinator.protocol.liveness import Silence
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, whole_board
from coordinator.protocol.watch import ENDED
from coordinator.settings import RunSettings, SettingsError
from coordinator.views.beats import said_in
from rollout.storage import files

ROLLOUTS = {Phase.TRAIN_ROLLOUT.label, Phase.EVAL_ROLLOUT.label}

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
        said = {rank: said_in(self.run_dir, beat) for rank, beat in board.beats.items()}
        settings = RunSettings.published(record.settings) if record else RunSettings()
        self._read_metrics(said.get(MASTER, {}))
        still_s = self._observe(board, settings)
        timeout_s = settings.cluster.node_timeout_s
        gone = {rank for rank in said if _is_gone(said[rank]) or still_s.get(rank, 0.0) >= timeout_s}
        return self._describe(board, record, settings, said, gone, still_s)

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
        return self._silence.silent_s

    def _describe(
        self,
        board: Board,
        record: EpochRecord | None,
        settings: RunSettings,
        said: Said,
        gone: set[int],
        still_s: Mapping[int, float],
    ) -> dict[str, Any]:
        master = said.get(MASTER, {})
        phase = master.get("phase", "") or master.get("state", "")
        silent_s = _silent_s(said, still_s)
        ranks = range(settings.cluster.num_nodes)
        nodes = [_node(rank, settings, board, record, said, gone, silent_s.get(rank, 0.0)) for rank in ranks]
        self._add_complaints(nodes, board, record)
        left_s = [node["left_s"] for node in nodes if node["left_s"] is not None and node["phase"] == phase]
        waiting_s = silent_s.get(MASTER, 0.0) if MASTER in gone else master.get("waiting_s", 0.0)
        return {
            "run_id": self._run_id,
            "state": _state(board, record, said, gone),
            "epoch": record.epoch if record else 0,
            "iteration": master.get("iteration") or (self.lines[-1]["iteration"] if self.lines else 0),
            "iterations": settings.iterations,
            "phase": phase,
            "waiting_for": [MASTER] if MASTER in gone else master.get("waiting_for", []),
            "waiting_s": float(waiting_s),
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


def _silent_s(said: Said, still_s: Mapping[int, float]) -> dict[int, float]:
    """Seconds of silence by rank: the larger of the master's last observation and our own."""
    observed: dict[int, float] = dict(said.get(MASTER, {}).get("silent_s", {}))
    ended = {rank for rank, content in said.items() if content.get("state") == ENDED}
    own = {rank: round(seconds, 1) for rank, seconds in still_s.items() if rank not in ended}
    return {rank: max(observed.get(rank, 0.0), own.get(rank, 0.0)) for rank in {*observed, *own}}


def _state(board: Board, record: EpochRecord | None, said: Said, gone: set[int]) -> str:
    if record is None:
        return "stopped"
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
