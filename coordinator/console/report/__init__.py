"""`run report`: show a run as one HTML page that needs no other file."""

import base64
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from coordinator.console.report import charts, curves, faults, figures, figures_of_time, samples, summary
from coordinator.console.report.sources import CrewEvents, newest_record, read_crews
from coordinator.console.report.timeline import Span
from coordinator.console.report.values import duration
from coordinator.console.views.crew_status import crew_dirs
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.run import Run
from coordinator.console.views.status_text import lineage
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings.loading import build, flatten
from coordinator.settings.tree import RunSettings, SettingsError
from rollout.storage import files

NAME = "report.html"
SIZE = (charts.WIDTH, charts.HEIGHT, charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP)
BALANCED_OVER = 10
"""How many iterations suggested weights are computed from."""


def write_report(root: Path, out: Path | None = None) -> Path:
    """Write the page about the run at `root` to `out`, or to report.html in it. Returns its path.

    If the path is a link, its target is written. Raises SettingsError if there is no run, or if the page
    cannot be written.
    """
    path = out or root / NAME
    _write(path, render(root, Run(root).status()))
    return path


def write_comparison(first: Path, second: Path, lines: Sequence[str], out: Path) -> Path:
    """Write a page with the curves of two runs in the same charts to `out`, under the `lines` that say how
    they differ. Returns its path; raises SettingsError as write_report.
    """
    roots = {f"A: {first.absolute().name}": first, f"B: {second.absolute().name}": second}
    metrics = {name: published.metrics_lines(RunDir(root)) for name, root in roots.items()}
    contents = {"lines": lines, "charts": curves.of_runs(metrics), "size": SIZE, "made_at": _now()}
    _write(out, _fill("comparison.html.j2", contents))
    return out


def _write(path: Path, page: str) -> None:
    try:
        files.publish(_writable(path), page.encode("utf-8", "replace"), durable=False)
    except OSError as error:
        raise SettingsError(f"--out {path}: {error.strerror}; give a file that can be written") from None


def _writable(path: Path) -> Path:
    """Return the file that `path` leads to. Raises SettingsError if it is no file, or has no directory."""
    target = Path(os.path.realpath(path))
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        regular = target.parent.is_dir()
    if target.is_dir():
        raise SettingsError(f"--out {path}: is a directory; give the name of a file in it, e.g. page.html")
    if not regular:
        raise SettingsError(f"--out {path}: give the name of a file in a directory that is there")
    return target


def render(root: Path, status: dict[str, Any]) -> str:
    """Return the page about a run."""
    return _fill("page.html.j2", _contents(root, status))


def _fill(template: str, contents: dict[str, Any]) -> str:
    """Return a page. The template escapes all text that comes from the run."""
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
    filters |= {"duration": duration, "number": charts.number_text, "json": json.dumps, "gpus": _gpus}
    return environment.get_template(template).render(**contents, script=script, script_digest=digest)


def _contents(root: Path, status: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the template shows."""
    crews = read_crews(crew_dirs(root))
    leading, trainers = crews[0], crews[-1].run_dir
    run_dir = leading.run_dir
    lines = published.metrics_lines(run_dir)
    spans = {
        crew.run_dir.name(rank): node_spans
        for crew in crews
        for rank, node_spans in sorted(crew.spans.items())
    }
    weights = _balance(run_dir, leading.spans, status) if len(crews) == 1 else None
    checkpoint = max(published.checkpoints(run_dir), default=None)
    happened = _faults(crews)
    record = newest_record(run_dir)
    settings = RunSettings.published(record.settings) if record else RunSettings()
    fork: dict[str, Any] | None = status.get("forked_from")
    return {
        "name": root.name,
        "status": status,
        "made_at": _now(),
        "tiles": summary.tiles(status, lines),
        "advice": summary.advice(root, status, lines, weights, checkpoint, settings.trainer.sound_kl),
        "charts": curves.charts(lines, fork["iteration"] if fork else None),
        "size": SIZE,
        "timelines": figures_of_time.timelines(crews, status, lines),
        "crews": figures_of_time.comparison(crews),
        "events_skipped": any(crew.events.skipped for crew in crews),
        "unreadable": sorted({name for crew in crews for name in crew.events.unreadable}),
        "node_iterations": figures.node_iterations(spans) or len(lines),
        "has_events": any(spans.values()),
        "shares": figures.time_shares(spans, lines)
        if any(spans.values())
        else figures.shares_by_metrics(lines),
        "meanings": figures.MEANINGS,
        "styles": {
            name: {figures.WAITING: "waiting", figures.OTHER_CREW: "idle", figures.BROKEN: "held"}.get(
                name, name
            )
            for name in figures.ORDER
        },
        "phases": figures.phase_times(spans),
        "waiting": figures.waiting(spans, lines, trainers.name),
        "hosts": _hosts(crews, status),
        "weights": weights,
        "faults": happened[-faults.SHOWN :],
        "faults_left_out": max(0, len(happened) - faults.SHOWN),
        "retries": [
            replace(retry, rank=crew.run_dir.machine(retry.rank), crew=crew.crew)
            for crew in crews
            for retry in faults.retries(crew.events.lines)
        ],
        "readings": _readings(run_dir, lines),
        **_about(crews, status),
    }


def _faults(crews: Sequence[CrewEvents]) -> list[faults.Fault]:
    """Return the faults of all crews, in order; of two crews, by iteration."""
    listed = [
        replace(fault, rank=crew.run_dir.machine(fault.rank), crew=crew.crew)
        for crew in crews
        for fault in faults.all_faults(crew.events.lines)
    ]
    return listed if len(crews) == 1 else sorted(listed, key=lambda fault: fault.iteration)


def _balance(run_dir: RunDir, spans: dict[int, list[Span]], status: dict[str, Any]) -> figures.Balance | None:
    """Suggest weights from the work and groups of the last iterations; without a manifest, from weights."""
    weights = {node["rank"]: float(node["weight"]) for node in status["nodes"]}
    worked = figures.rollout_work(spans, list(weights), BALANCED_OVER)
    if not worked:
        return None
    seconds, tasks = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    for iteration, by_rank in worked.items():
        manifest = published.read_manifest(run_dir, "train", iteration) or {}
        groups = {rank: 0 for rank in weights}
        for entry in manifest.get("parts", []):
            groups[entry["rank"]] = groups.get(entry["rank"], 0) + len(entry["slots"])
        for rank, work_s in by_rank.items():
            seconds[rank] += work_s / len(worked)
            tasks[rank] += (groups[rank] if manifest else 1000 * weights[rank]) / len(worked)
    return figures.balance(seconds, tasks)


def _hosts(crews: Sequence[CrewEvents], status: dict[str, Any]) -> dict[str, str]:
    """Return the host of each node that was ever in the run, by name; it may have fewer nodes now."""
    hosts = {crew.run_dir.name(rank): host for crew in crews for rank, host in crew.hosts.items()}
    return hosts | {node["name"]: node["host"] for node in status["nodes"] if node["host"]}


def _readings(run_dir: RunDir, lines: list[dict[str, Any]]) -> list[samples.IterationGroups]:
    """Groups of the first and the last iteration that have rewards."""
    sampled = [line["iteration"] for line in lines if is_number(line.get("reward"))]
    return [samples.reading(run_dir, iteration) for iteration in dict.fromkeys([*sampled[:1], *sampled[-1:]])]


def _about(crews: Sequence[CrewEvents], status: dict[str, Any]) -> dict[str, Any]:
    """Settings, nodes and versions."""
    run_dir = crews[0].run_dir
    record = newest_record(run_dir)
    settings = dict(flatten(record.settings)) if record else {}
    usual = dict(flatten(build({"model": settings.get("model") or "any"}).model_dump(mode="json")))
    if record and "trainer.save_interval" not in (record.given.settings if record.given else {}):
        usual["trainer.save_interval"] = settings.get("trainer.save_interval")  # the start has chosen it
    nodes = {
        crew.run_dir.name(rank): _about_node(events)
        for crew in crews
        for rank, events in crew.events.lines.items()
    }
    return {
        "settings": [
            (name, value, name == "model" or value != usual.get(name)) for name, value in settings.items()
        ],
        "nodes": [(node, nodes.get(node["name"], {})) for node in status["nodes"]],
        "subject": _subject(published.read_json(run_dir.run_json) or {}),
        "versions": sorted({_versions(line) for line in nodes.values()} - {""}),
    }


def _about_node(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that the newest process of a rank has told, with the GPUs it had when it entered an
    epoch.
    """
    facts: dict[str, Any] = {}
    for line in lines:
        if line["what"] in {"process", "epoch"}:
            facts = dict(line) if line["what"] == "process" else {**facts, "gpus": line.get("gpus", [])}
    return facts


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M")


def _subject(run: dict[str, Any]) -> str:
    """`Qwen/Qwen3-4B on sums.jsonl, forked from /shared/exp1 at iteration 5, `."""
    fixed = run.get("fixed", {})
    names = [fixed[key]["name"] for key in ("model", "tasks") if fixed.get(key)]
    return "".join(f"{text}, " for text in (" on ".join(names), *lineage(run.get("forked_from"))) if text)


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
