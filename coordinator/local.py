"""`run local`: the nodes of a run as processes of this machine, in one terminal."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator import outputs
from coordinator.children import Child, Children
from coordinator.config import build
from coordinator.inputs import load_inputs
from coordinator.outcome import Exit
from coordinator.report import draw_rewards
from coordinator.run_dir import RunDir
from coordinator.settings import SettingsError
from coordinator.start import check_log_path
from coordinator.status import read_status

REFRESH_S = 0.25
GRACE_S = 15.0
"""After a second interrupt nodes have this long to end by themselves."""


def run_local(root: Path, given: Mapping[str, Any]) -> int:
    """Start all nodes, show them live, say what came of it; the first exit code that is not 0."""
    settings = build(given)
    check_log_path(root)
    load_inputs(settings, given)
    console = Console(highlight=False, soft_wrap=True)
    nodes = settings.cluster.num_nodes
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // nodes))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}

    def echo(line: str) -> None:
        console.print(Text(line))

    interrupts = _Interrupts()
    with Children() as children:
        overrides = as_overrides({**given, "cluster.num_nodes": nodes})
        started: list[Child] = []
        for rank in range(nodes):
            role = ["--worker", str(rank)] if rank else ["--master", *overrides]
            argv = [sys.executable, "-m", "coordinator.cli", "--log-path", str(root), *role]
            started.append(children.start(f"node-{rank}", argv, env=environment, echo=echo))
        codes = _follow(started, root, console, interrupts)
    _say_results(RunDir(root), console)
    failed = [code for code in codes if code != 0]
    return next((code for code in failed if code > 0), Exit.LOST) if failed else Exit.DONE


class _Interrupts:
    """Ctrl+C goes to the master, which tells the others; a second one, or SIGTERM, goes to every node.

    The handler only notes the signal: it may interrupt anything, a child's lock included.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: self.received.append(received))
        self._forwarded = 0

    def forward(self, nodes: list[Child]) -> bool:
        """Pass on what has come since the last call; whether all nodes have been told to end."""
        everybody = len(self.received) > 1 or any(number != signal.SIGINT for number in self.received)
        if len(self.received) > self._forwarded:
            self._forwarded = len(self.received)
            for node in nodes if everybody else nodes[:1]:
                if node.poll() is None:
                    os.kill(node.pid, signal.SIGTERM if everybody else signal.SIGINT)
        return everybody


def _follow(nodes: list[Child], root: Path, console: Console, interrupts: _Interrupts) -> list[int]:
    """Show a line a node until all have ended; their exit codes."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        told_s = 0.0
        while any(node.poll() is None for node in nodes) and told_s < GRACE_S:
            told_s += REFRESH_S if interrupts.forward(nodes) else 0.0
            if console.is_terminal:
                live.update(_lines(root), refresh=True)
            time.sleep(REFRESH_S)
    return [code if (code := node.poll()) is not None else Exit.LOST for node in nodes]


def _lines(root: Path) -> Text:
    """`rank 1  train_rollout  [########........] 37/64`."""
    try:
        status = read_status(root)
    except (SettingsError, OSError, ValueError):
        return Text("starting")
    of = f"/{status['iterations']}" if status["iterations"] else ""
    lines = [f"iteration {status['iteration']}{of}  {status['phase']}"]
    for node in status["nodes"]:
        done, total = node["tasks_done"], node["tasks_assigned"]
        bar = f"[{'#' * (24 * done // total):<24}] {done}/{total}" if total else ""
        lines.append(f"  rank {node['rank']}  {node['state']:<10} {node['phase']:<18} {bar}")
    return Text("\n".join(lines), no_wrap=True)


def _say_results(run_dir: RunDir, console: Console) -> None:
    lines = outputs.metrics_lines(run_dir)
    rewards = [(line["iteration"], line["reward"]) for line in lines if line.get("reward") is not None]
    if rewards:
        (first, before), (last, after) = rewards[0], rewards[-1]
        console.print(f"reward     {before:.3f} in iteration {first}, {after:.3f} in iteration {last}")
    scores = [
        (line["iteration"], line["eval_reward"]) for line in lines if line.get("eval_reward") is not None
    ]
    if scores:
        texts = [f"{score:.3f} in iteration {iteration}" for iteration, score in (scores[0], scores[-1])]
        console.print(f"evaluation {', '.join(dict.fromkeys(texts))}")
    if found := outputs.checkpoints(run_dir):
        console.print(f"checkpoint {run_dir.checkpoint(found[-1])}")
    if rewards and (picture := draw_rewards(run_dir)):
        console.print(f"picture    {picture}")
    if run_dir.root.is_dir():
        console.print(f"run        {run_dir.root}")


def as_overrides(given: Mapping[str, Any]) -> list[str]:
    """Settings as the arguments that say the same."""
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]
