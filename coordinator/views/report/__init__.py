"""`run report`: show a run as one HTML page that needs no other file."""

import base64
import hashlib
import json
import os
import stat
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from coordinator.config import build, flatten
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings import SettingsError
from coordinator.views.report import charts, curves, faults, figures, samples, summary
from coordinator.views.report.sources import Events, newest_record, read_events
from coordinator.views.report.timeline import Span, Timelines, spans_of
from coordinator.views.report.values import is_number, seconds_of
from coordinator.views.run import Run
from rollout.storage import files

NAME = "report.html"
SLOWEST = 2
"""How many of the slowest iterations are shown beside the last ones."""
BALANCED_OVER = 10
"""How many iterations suggested weights are computed from."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page about the run at `root` to `out`, or to report.html in it. Returns its path.

    If the path is a link, its target is written. Raises SettingsError if there is no run, or if the page
    cannot be written.
    """
    path = out or root / NAME
    status = Run(root).status()
    try:
        target = _writable(path)
        files.publish(target, render(root, status).encode("utf-8", "replace"), durable=False)
    except OSError as error:
        raise SettingsError(f"--out {path}: {error.strerror}; give a file that can be written") from None
    return path


def _writable(path: Path) -> Path:
    """Return the file that `path` leads to. Raises SettingsError if it is no file, or has no directory."""
    target = Path(os.path.realpath(path))
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        regular = target.parent.is_dir()
    if not regular:
        raise SettingsError(f"--out {path}: give the name of a file in a directory that is there")
    return target


def render(root: Path, status: dict[str, Any]) -> str:
    """Return the page. The template escapes all text that comes from the run."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (Path(__file__).parent / "readout.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filters: dict[str, Any] = environment.filters  # pyright: ignore
    filters |= {"duration": summary.duration, "number": charts.number_text, "json": json.dumps, "gpus": _gpus}
    return environment.get_template("page.html.j2").render(
        **_contents(root, status), script=script, script_digest=digest
    )


def _contents(root: Path, status: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the template shows."""
    run_dir = RunDir(root)
    lines = published.metrics_lines(run_dir)
    events = read_events(run_dir)
    spans = {rank: spans_of(rank, found) for rank, found in events.lines.items()}
    weights = _balance(run_dir, spans, status)
    checkpoint = max(published.checkpoints(run_dir), default=None)
    told = faults.all_faults(events.lines)
    return {
        "name": root.name,
        "status": status,
        "made_at": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "tiles": summary.tiles(status, lines),
        "advice": summary.advice(root, status, lines, weights, checkpoint),
        "charts": curves.charts(lines),
        "size": (charts.WIDTH, charts.HEIGHT, charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP),
        "timelines": _timelines(spans, status, lines),
        "events_skipped": events.skipped,
        "unreadable": events.unreadable,
        "node_iterations": figures.node_iterations(spans) or len(lines),
        "has_events": any(spans.values()),
        "shares": figures.time_shares(spans) if any(spans.values()) else figures.shares_by_metrics(lines),
        "meanings": figures.MEANINGS,
        "styles": {
            name: {figures.WAITING: "waiting", figures.BROKEN: "held"}.get(name, name)
            for name in figures.ORDER
        },
        "rows": figures.row_times(spans),
        "waiting": figures.waiting(spans, lines),
        "hosts": _hosts(events, status),
        "weights": weights,
        "faults": told[-faults.SHOWN :],
        "faults_left_out": max(0, len(told) - faults.SHOWN),
        "retries": faults.retries(events.lines),
        "readings": _readings(run_dir, lines),
        **_about(run_dir, events, status),
    }


def _balance(run_dir: RunDir, spans: dict[int, list[Span]], status: dict[str, Any]) -> figures.Balance | None:
    """Suggest weights from the work and groups of the last iterations; without a manifest, from weights."""
    weights = {node["rank"]: float(node["weight"]) for node in status["nodes"]}
    worked = figures.rollout_work(spans, list(weights), BALANCED_OVER)
    if not worked:
        return None
    seconds, tasks = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    for iteration, by_rank in worked.items():
        manifest = published.read_manifest(run_dir, "train", iteration) or {}
        made = {rank: 0 for rank in weights}
        for entry in manifest.get("parts", []):
            made[entry["rank"]] = made.get(entry["rank"], 0) + len(entry["slots"])
        for rank, work_s in by_rank.items():
            seconds[rank] += work_s / len(worked)
            tasks[rank] += (made[rank] if manifest else 1000 * weights[rank]) / len(worked)
    return figures.balance(seconds, tasks)


def _timelines(
    spans: dict[int, list[Span]], status: dict[str, Any], lines: list[dict[str, Any]]
) -> list[charts.Lanes]:
    """Return the current iteration, the last finished one, and the slowest of the others."""
    running = status["state"] in {"running", "holding"}
    here_s = {node["rank"]: seconds_of(node, "row_s") for node in status["nodes"]} if running else {}
    all_nodes = Timelines(spans, here_s)
    numbers = all_nodes.iterations
    finished = {line["iteration"] for line in lines}
    last = [number for number in numbers if number in finished][-1:]
    present = [number for number in numbers[-1:] if number not in finished]
    rest = sorted(set(numbers) - {*last, *present}, key=all_nodes.seconds, reverse=True)[:SLOWEST]
    what = dict.fromkeys(rest, "among the slowest") | dict.fromkeys(last, "the last that was finished")
    what |= dict.fromkeys(present, "going on" if running else "not finished")
    chosen = [*present, *last, *rest]
    return [charts.lanes(all_nodes.of(number), f"Iteration {number}, {what[number]}") for number in chosen]


def _hosts(events: Events, status: dict[str, Any]) -> dict[int, str]:
    """Return the host of each rank that was ever in the run; it may have fewer nodes now."""
    told = {rank: faults.host_of(found) for rank, found in events.lines.items()}
    return told | {node["rank"]: node["host"] for node in status["nodes"] if node["host"]}


def _readings(run_dir: RunDir, lines: list[dict[str, Any]]) -> list[samples.Reading]:
    """Groups of the first and the last iteration that have rewards."""
    sampled = [line["iteration"] for line in lines if is_number(line.get("reward"))]
    return [samples.reading(run_dir, iteration) for iteration in dict.fromkeys([*sampled[:1], *sampled[-1:]])]


def _about(run_dir: RunDir, events: Events, status: dict[str, Any]) -> dict[str, Any]:
    """Settings, nodes and versions."""
    record = newest_record(run_dir)
    settings = dict(flatten(record.settings)) if record else {}
    usual = dict(flatten(build({"model": settings.get("model") or "any"}).model_dump(mode="json")))
    nodes = {rank: _about_node(found) for rank, found in events.lines.items()}
    return {
        "settings": [
            (name, value, name == "model" or value != usual.get(name)) for name, value in settings.items()
        ],
        "nodes": [(node, nodes.get(node["rank"], {})) for node in status["nodes"]],
        "subject": _subject((published.read_json(run_dir.run_json) or {}).get("fixed", {})),
        "versions": sorted({_versions(line) for line in nodes.values()} - {""}),
    }


def _about_node(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that the newest process of a rank has told, with the GPUs it had when it entered an
    epoch.
    """
    about: dict[str, Any] = {}
    for line in lines:
        if line["what"] in {"process", "epoch"}:
            about = dict(line) if line["what"] == "process" else {**about, "gpus": line.get("gpus", [])}
    return about


def _subject(fixed: dict[str, Any]) -> str:
    """`Qwen/Qwen3-4B on sums.jsonl, `."""
    names = [fixed[what]["name"] for what in ("model", "tasks") if fixed.get(what)]
    return " on ".join(names) + (", " if names else "")


def _versions(process: dict[str, Any]) -> str:
    """`flagpost 0.1.0, python 3.11.2, ...`."""
    versions: Any = process.get("versions")
    if not isinstance(versions, dict):
        return ""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)  # pyright: ignore


def _gpus(names: Any) -> str:
    """`8 x NVIDIA H100`."""
    if not isinstance(names, list):
        return ""
    return ", ".join(f"{count} x {name}" for name, count in Counter(map(str, names)).items())  # pyright: ignore
