"""Read the state of a run from its directory; any process may do so at any time, and nothing is written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.console.views.crew_reader import CrewReader
from coordinator.console.views.crew_status import GOING, crew_dirs
from coordinator.directory import published
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.metrics_file import MetricsFile
from coordinator.machine.run_command import node_command
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import ONE_CREW, Placement, device_counts, read_placement
from coordinator.protocol.snapshot import ranks_text
from coordinator.settings.tree import SettingsError
from rollout.storage import files


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
        self._forked_from: dict[str, Any] | None = None
        self._placement: Placement | None = None
        self._crews: list[CrewReader] = []
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
            _refuse_unsaid(root, read_placement(root) if root.is_dir() else ONE_CREW)
            from coordinator.start.run_json import no_run  # it takes numpy

            if is_there:
                raise SettingsError(f"--log-path {root}: no run there (its run.json cannot be read)")
            raise no_run(root)
        if run.get("format") != FORMAT:
            run_format = run.get("format")
            raise SettingsError(
                f"--log-path {root}: a run of format {run_format}; this version reads {FORMAT}"
            )
        self._run_id = str(run.get("run_id"))
        self._forked_from = run.get("forked_from")

    def read(self) -> dict[str, Any]:
        """Return the state as `run status --json` prints it; SettingsError if there is no run,
        SharedFsError."""
        self.open()
        self._find_crews()
        snapshots = [crew.look() for crew in self._crews]
        self._read_metrics(snapshots[-1].master)
        last = self.lines[-1] if self.lines else None
        finished = last["iteration"] if last else 0
        is_awaited = any(crew.state in GOING for crew in snapshots)
        crews = [crew.describe(finished, is_awaited) for crew in snapshots]
        weights: dict[str, float] = (last or {}).get("measured_weights") or {}
        for node in (node for crew in crews for node in crew["nodes"]):
            generates = node["crew"] != "train"
            node["measured_weight"] = weights.get(str(node["rank"])) if generates else None
        forked = {"forked_from": self._forked_from} if self._forked_from else {}
        return {"run_id": self._run_id, **forked, **together(crews), "crews": crews, "last_metrics": last}

    def _find_crews(self) -> None:
        """Take over the placement of the newest start: the crew that generates first."""
        placement = read_placement(self.run_dir.root)
        if placement != self._placement:
            _refuse_unsaid(self.run_dir.root, placement)
            self._crews = [CrewReader(run_dir) for run_dir in crew_dirs(self.run_dir.root)]
            self._placement = placement

    def _read_metrics(self, master: Mapping[str, Any]) -> None:
        """Read metrics.jsonl unless it cannot have a new line: the master of those who train writes one in an
        iteration's last phase.
        """
        place = tuple(master.get(name) for name in ("pid", "state", "iteration", "phase"))
        if place != self._place or place[-1] in {None, Phase.ITERATION_END.label}:
            is_there = self.run_dir.metrics.name in files.file_names(self.run_dir.root)
            self.lines = self._metrics.read() if is_there else []
        self._place = place


def _refuse_unsaid(root: Path, placement: Placement) -> None:
    """Raise SettingsError while the crews are not known: a machine has not said how many devices it has."""
    unsaid = sorted(set(range(placement.num_nodes)) - device_counts(root).keys()) if placement.place else []
    if unsaid:
        raise SettingsError(
            f"--log-path {root}: the run waits for {ranks_text(unsaid)} to say what devices there are; on "
            f"the machine of rank {unsaid[0]}: {node_command(root, unsaid[0])}"
        )


def together(crews: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a run from that of its crews, of which the last one trains. Iteration and phase are
    its own.
    """
    first, last = crews[0], crews[-1]
    states = {crew["state"] for crew in crews}
    state = next((state for state in ("holding", "running", "stopped") if state in states), "finished")
    return {
        "state": state,
        "epoch": last["epoch"],
        "iteration": last["iteration"],
        "iterations": last["iterations"] or first["iterations"],
        "phase": last["phase"],
        "waiting_for": sorted({rank for crew in crews for rank in crew["waiting_for"]}),
        "waiting_s": max(crew["waiting_s"] for crew in crews),
        "left_s": first["left_s"],
        "num_nodes": sum(crew["num_nodes"] for crew in crews),
        "nodes": [node for crew in crews for node in crew["nodes"]],
    }
