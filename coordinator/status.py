"""What a run directory says of a run, read by anybody at any time; nothing is written."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from coordinator import outputs
from coordinator.board import Board, parse, ranks_text
from coordinator.epochs import MASTER, EpochRecord, Records, read_beat
from coordinator.network import host_identity
from coordinator.run_dir import FORMAT, RunDir
from coordinator.settings import RunSettings, SettingsError
from coordinator.watch import ENDED


def read_status(root: Path) -> dict[str, Any]:
    """The state of the run at `root`, as INTERFACE `run status --json`; SettingsError if there is none."""
    run_dir = RunDir(root)
    run = outputs.read_json(run_dir.run_json) if root.is_dir() else None
    if run is None:
        raise SettingsError(f"--log-path {root}: no run there (no run.json that can be read)")
    if run.get("format") != FORMAT:
        raise SettingsError(
            f"--log-path {root}: a run of format {run.get('format')}; this version reads {FORMAT}"
        )
    board = parse(outputs.names(run_dir.protocol))
    record = Records(run_dir).newest(board.records)
    said = {rank: read_beat(run_dir, beat) for rank, beat in board.beats.items()}
    master = said.get(MASTER, {})
    lines = outputs.metrics_lines(run_dir)
    settings = RunSettings.published(record.settings) if record else RunSettings()
    gone = {rank for rank, content in said.items() if _is_gone(content)}
    state = _state(board, record, said, gone)
    ranks = range(settings.cluster.num_nodes)
    return {
        "run_id": run["run_id"],
        "state": state,
        "epoch": record.epoch if record else 0,
        "iteration": master.get("iteration") or (lines[-1]["iteration"] if lines else 0),
        "iterations": settings.iterations,
        "phase": master.get("phase", "") or master.get("state", ""),
        "waiting_for": [MASTER] if MASTER in gone else master.get("waiting_for", []),
        "num_nodes": settings.cluster.num_nodes,
        "nodes": [_node(rank, settings, board, record, said, gone) for rank in ranks],
        "last_metrics": lines[-1] if lines else None,
    }


def _is_gone(content: dict[str, Any]) -> bool:
    """Whether a process has ended; one of another machine is not known to have."""
    if not content:
        return False
    here = content["peer"]["identity"] == host_identity()
    return content.get("state") == ENDED or (here and not psutil.pid_exists(content["pid"]))


def _state(board: Board, record: EpochRecord | None, said: dict[int, dict[str, Any]], gone: set[int]) -> str:
    if record is None:
        return "stopped"
    if record.kind == "finished":
        return "finished"
    calls = {(flag.kind, flag.rank == MASTER) for flag in board.calls if flag.epoch == record.epoch}
    if ("left", True) in calls or {kind for kind, _ in calls} & {"failed", "gave_up", "stopped"}:
        return "stopped"
    if MASTER in gone:  # its workers hold for it, unless it is plain that they have ended too
        held = (said.keys() & record.members.keys()) - gone
        return "holding" if held else "stopped"
    return "holding" if record.kind == "lobby" or ("lost", True) in calls else "running"


def _node(
    rank: int,
    settings: RunSettings,
    board: Board,
    record: EpochRecord | None,
    said: dict[int, dict[str, Any]],
    gone: set[int],
) -> dict[str, Any]:
    """A node as its last beat, and what the master last observed of it, say."""
    content = said.get(rank, {})
    member = record.members.get(rank) if record else None
    silent_s = float(said.get(MASTER, {}).get("silent_s", {}).get(str(rank), 0.0))
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
        "weight": member.weight if member else settings.cluster.weight(rank),
        "tasks_assigned": content.get("total", 0),
        "tasks_done": content.get("done", 0),
        "silent_s": silent_s,
    }


def render(status: dict[str, Any], root: Path) -> str:
    """The state for a person, a line a node."""
    of = f" of {status['iterations']}" if status["iterations"] else ""
    going = status["state"] in {"running", "holding"}
    waits = f", waiting for {ranks_text(status['waiting_for'])}" if going and status["waiting_for"] else ""
    where = f"iteration {status['iteration']}{of}, {status['phase']}{waits}"
    lines = [
        f"{root}: run {status['run_id']} is {status['state']} (epoch {status['epoch']})",
        where if going else f"it was last in {where}",
        "",
        f"{'rank':>4}  {'host':<20} {'address':<15} {'state':<10} {'phase':<18} {'tasks':>9}  weight  silent",
    ]
    for node in status["nodes"]:
        tasks = f"{node['tasks_done']}/{node['tasks_assigned']}" if node["tasks_assigned"] else ""
        lines.append(
            f"{node['rank']:>4}  {node['host'][:20]:<20} {node['address']:<15} {node['state']:<10} "
            f"{node['phase']:<18} {tasks:>9}  {node['weight']:>6g}  {node['silent_s']:.1f} s"
        )
    if last := status["last_metrics"]:
        figures = [
            f"{name} {last[name]:.3f}" for name in ("reward", "eval_reward") if last.get(name) is not None
        ]
        lines += ["", ", ".join([f"last finished: iteration {last['iteration']}", *figures])]
    return "\n".join(lines)


def show_status(root: Path, as_json: bool, watch: bool) -> None:
    """Print the state of the run at `root`; `watch`: until interrupted."""
    while True:
        state = read_status(root)
        clear = "\x1b[H\x1b[2J" if watch and sys.stdout.isatty() else ""
        print(clear + (json.dumps(state) if as_json else render(state, root)), flush=True)
        if not watch:
            return
        time.sleep(2.0)
