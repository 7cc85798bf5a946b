"""Readings of a server's jobs: each comes from their directories."""

import io
import threading
import time
from pathlib import Path
from typing import Any

from coordinator.console.server.jobs import Job, UnknownJob
from coordinator.console.server.runner import OUTPUT, PROCESS
from coordinator.console.server.starts import JobStart
from coordinator.console.views import status_text
from coordinator.console.views.crew_status import crew_dirs
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.logs import LogPrinter, nodes_with_logs, tail
from coordinator.console.views.run import Run
from coordinator.console.views.status import StatusReader
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.journal.control_characters import plain
from coordinator.protocol.exits import OUTCOMES
from coordinator.settings.tree import SettingsError
from rollout.engines.model_dir import CONTENT, PROBE
from rollout.storage import files

FRESH_S = 0.5
"""A reading that is younger than this is given again: many may look at once."""
POINTS, NODES = 160, 48
"""At most so many points of a curve, and nodes of a run, are told of each job in a list."""
LONGEST_LINE = 1 << 20
"""Output without line ends is given after so many bytes."""
WORDS = 400
"""At most so many letters of what a run has said last."""


class JobReader:
    """Read the state of jobs; for any thread. What it remembers is only what saves reading it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[Path, StatusReader] = {}
        self._told: dict[Path, tuple[float, dict[str, Any]]] = {}
        self._ended: dict[Path, tuple[int, dict[str, Any]]] = {}

    def tell(self, job: Job) -> dict[str, Any]:
        """Return all that is known of a job: `run` is its status as `run status --json` prints it, or None
        before there is a run; `text` says the same to a person.
        """
        with self._lock:
            at_s, status = self._told.get(job.log_path, (-FRESH_S, {}))
            if not status or time.monotonic() - at_s >= FRESH_S:
                status = self._read(job)
                self._told[job.log_path] = time.monotonic(), status
            return status

    def list(self, job: Job) -> dict[str, Any]:
        """Return the entry of a job in a list. Of a job that has ended it is not read again."""
        number = job.start().number
        of_start, listed = self._ended.get(job.log_path, (0, {}))
        if of_start == number:
            return listed
        status = self.tell(job)
        points: Any = status["points"]
        run: dict[str, Any] = status["run"] or {}
        listed = {key: status[key] for key in ("name", "state", "at", "start", "error")}
        listed |= {
            **{key: run.get(key) for key in ("iteration", "iterations", "phase", "num_nodes")},
            "waiting": "; ".join(filter(None, map(status_text.waiting, run.get("crews", [])))),
            "points": points,
            "nodes": [
                {key: node[key] for key in ("name", "host", "state", "phase", "tasks_done", "tasks_assigned")}
                for node in run.get("nodes", [])[:NODES]
            ],
        }
        if status["exit_code"] is not None:
            self._ended[job.log_path] = number, listed
        return listed

    def forget(self, job: Job) -> None:
        """Read the job anew: something was done to it."""
        with self._lock:
            self._told.pop(job.log_path, None)
            self._ended.pop(job.log_path, None)

    def _read(self, job: Job) -> dict[str, Any]:
        reader = self._readers.setdefault(job.log_path, StatusReader(job.log_path))
        try:
            run = reader.read()
        except SettingsError:  # there is no run yet, or none that this version reads
            run = None
        state = job.state(run["state"] if run else None, run["iteration"] if run else 0)
        start = job.start()
        words = "" if run and state not in {"failed", "lost"} else _last_words(job.output())
        error = words if state in {"failed", "lost"} else ""
        head = f"job {job.name} is {state}{f', start {start.number}' if start.number > 1 else ''}"
        body = status_text.render(run, job.log_path) if run else words
        return {
            "name": job.name,
            "state": state,
            "at": job.document["at"],
            "start": start.number,
            "exit_code": start.exit_code(),
            "options": job.document["options"],
            "files": sorted(job.document["files"]),
            "log_path": str(job.log_path),
            "error": error,
            "guests": list(map(_guest, job.guests())),
            "run": run,
            "text": "\n".join(filter(None, [head, body])),
            "points": _points(reader.lines),
        }


def _points(lines: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the curves of a run, thinned: [iteration, value] by name."""
    curves: dict[str, list[list[float]]] = {}
    for name in ("reward", "eval_reward"):
        known = [[line["iteration"], line[name]] for line in lines if is_number(line.get(name))]
        step = max(1, -(-len(known) // POINTS))
        curves[name] = [point for place, point in enumerate(known) if (len(known) - 1 - place) % step == 0]
    return curves


def _guest(guest: JobStart) -> dict[str, Any]:
    code = guest.exit_code()
    state = "running" if guest.is_alive() is not False else "lost" if guest.has(PROCESS) else "submitted"
    state = state if code is None else OUTCOMES.get(code, "failed")
    error = _last_words(guest.folder / OUTPUT) if state in {"failed", "lost"} else ""
    return {"number": guest.number, "state": state, "error": error}


def _last_words(output: Path) -> str:
    """Return the last line of what was printed to `output`."""
    try:
        data, _end = tail(output, 5)
    except OSError:  # nothing was started yet
        return ""
    lines = [line for line in plain(data.decode("utf-8", "replace")).splitlines() if line.strip()]
    return lines[-1][:WORDS] if lines else ""


class JobOutput:
    """What the newest start of a job prints, or what one of its nodes does; for `logs`."""

    def __init__(self, job: Job, rank: int | None) -> None:
        """`rank`: of the node whose logs are asked for; UnknownJob if there are none of it."""
        self._path = job.output()
        self._offset = 0
        self._text = io.StringIO()
        self._printer: LogPrinter | None = None
        if rank is not None:
            crews = crew_dirs(_run(job).run_dir.root)
            logged = sorted({run_dir.machine(its) for run_dir, its in nodes_with_logs(crews)})
            if rank not in logged:
                raise UnknownJob(
                    f"{job.name} has no logs of rank {rank}; there are logs of {logged or 'none yet'}"
                )
            self._printer = LogPrinter(crews, rank, self._text)

    def begin(self, lines: int) -> str:
        """Return the last `lines` lines."""
        if self._printer is not None:
            self._printer.begin(lines)
            return self._taken()
        try:
            data, end = tail(self._path, lines)
        except OSError:  # it has not begun
            return ""
        full_lines = data[: data.rfind(b"\n") + 1]
        self._offset = end - len(data) + len(full_lines)
        return plain(full_lines.decode("utf-8", "replace"))

    def more(self, is_last: bool = False) -> str:
        """Return the whole lines that have come since; `is_last`: also one that nobody will finish."""
        if self._printer is not None:
            self._printer.poll(look=True)
            return self._taken()
        if self._path.name not in published.names(self._path.parent):
            return ""
        data = files.read_from(self._path, self._offset)
        is_whole = is_last or len(data) > LONGEST_LINE
        lines = data if is_whole else data[: data.rfind(b"\n") + 1]
        self._offset += len(lines)
        return plain(lines.decode("utf-8", "replace"))

    def _taken(self) -> str:
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return text


def _run(job: Job) -> Run:
    """Return the run of a job; UnknownJob says why there is none."""
    try:
        return Run(job.log_path)
    except SettingsError as error:
        raise UnknownJob(f"{job.name} has no run yet: {error}") from None


def metrics_of(job: Job, since: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl from number `since` on, counted from 0."""
    try:
        return Run(job.log_path).metrics()[since:]
    except SettingsError:
        return []


def report_of(job: Job) -> str:
    """Return the page of `run report`; UnknownJob if there is no run yet."""
    from coordinator.console.report import render

    return render(job.log_path, _run(job).status())


def checkpoint_of(job: Job, iteration: int | None) -> dict[str, Any]:
    """Return the files of a checkpoint's model, with sizes and checksums; of the newest one for None.
    UnknownJob says which there are.
    """
    run_dir = _run(job).run_dir
    checkpoints = published.checkpoints(run_dir)
    iteration = max(checkpoints, default=0) if iteration is None else iteration
    if iteration not in checkpoints:
        choices = (
            f"there are checkpoints of {', '.join(map(str, checkpoints))}"
            if checkpoints
            else "there is none yet"
        )
        raise UnknownJob(f"{job.name} has no checkpoint of iteration {iteration}; {choices}")
    try:
        result = published.read_result(run_dir.checkpoint(iteration))
    except Incomplete as error:
        raise UnknownJob(str(error).splitlines()[0]) from None
    parts = {name: facts for name, facts in result.files.items() if published.is_part_of_model(name)}
    model = {name: facts for name, facts in parts.items() if name not in {PROBE, CONTENT}}
    return {"iteration": iteration, "iterations": checkpoints, "policy": result.policy, "files": model}


def file_of_checkpoint(job: Job, iteration: int, name: str) -> Path:
    """Return the path of a file that `checkpoint_of` has named; UnknownJob for any other name."""
    if name not in checkpoint_of(job, iteration)["files"]:
        raise UnknownJob(f"checkpoint {iteration} of {job.name} has no such file")
    return RunDir(job.log_path).checkpoint(iteration) / name
