"""Trace where the time of a run goes: the seconds that named functions take, in each of its processes.

A process started with `environment(directory)` writes a file in `directory`, with a line for each call of a
function in `SPANS`: name, start and end (time.monotonic, one clock for a machine), and the CPU seconds of the
process at both. The functions are wrapped when their module is imported; the run's own code is unchanged.
"""

import atexit
import functools
import importlib.abc
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

DIRECTORY = "FLAGPOST_BENCH_TRACE"
FLUSH_S = 0.2
STEP = "coordinator.node.node.Node.step"

SPANS: dict[str, tuple[str, ...]] = {
    "os": ("fsync",),
    "coordinator.node.node": ("Node.step",),
    "rollout.storage.files": (
        *("publish", "checksums", "fsync_directory", "make_directory"),
        *("remove_tree", "rename", "listing", "read"),
    ),
    "rollout.storage.lines": ("append_line",),
    "rollout.storage.once": ("create_once",),
    "rollout.storage.writer": ("write",),
    "coordinator.rows.rollout": (
        *("open_iteration", "plan_train", "collect_train", "name_parts", "write_manifest"),
    ),
    "coordinator.rows.evaluation": ("decide_eval",),
    "coordinator.rows.training": (
        *("stop_engine", "configure_training", "train", "publish_checkpoint", "restart_engine"),
    ),
    "coordinator.rows.batch": ("begin_batch", "write_batch"),
    "coordinator.rows.metrics": ("end_iteration",),
    "coordinator.directory.published": ("verify_checkpoint", "policy_of", "metrics_lines"),
    "coordinator.directory.parts": ("PartWriter.flush", "manifest", "read_groups"),
    "coordinator.machine.engine": ("EngineHost.ensure",),
    "coordinator.machine.weights": ("Loader._reload", "Loader._probe"),
    "coordinator.machine.trainer": ("TrainerHost.train",),
    "rollout.collect": ("Collector.run",),
    "rollout.engines.calls": ("Calls.call",),
    "rollout.engines.model_dir": ("check_model_dir",),
    "rollout.engines.embedded.engine": ("TorchEngine._reload",),
    "rollout.engines.embedded.batch": ("Batch.prompt_logprobs",),
    "rollout.engines.embedded.padded": ("PaddedBatch.join", "PaddedBatch.step", "PaddedBatch.keep"),
    "trainer.job.launch": ("next_request", "report_progress", "report_done"),
    "trainer.job.rank": ("TrainerRank.run", "TrainerRank._agree", "TrainerRank._learner", "read_batch"),
    "trainer.batch.batch": ("build_batch",),
    "trainer.batch.packing": ("plan_step",),
    "trainer.update.step": ("train", "_accumulate"),
    "trainer.model.model": ("Learner.apply", "Learner.logprobs", "Learner.add_up", "Learner.take_over_lead"),
    "trainer.checkpoint.checkpoint": ("load", "write", "_write_model"),
    "trainer.checkpoint.state": ("pieces", "StateSaver.finish"),
    "trainer.checkpoint.rank_files": ("gather_json",),
    "trainer.checkpoint.hub_weights": ("write_weights",),
    "trainer.checkpoint.probe": ("probe_logprobs",),
}
"""Module -> functions, as `name` or `Class.name`; what another module has imported by name is that one's."""


@dataclass(frozen=True)
class Span:
    """One call of a function."""

    process: str
    """The kind of process (node, engine, trainer, or other) and its id."""
    rank: int | None
    """Of a node or trainer."""
    name: str
    begin_s: float
    end_s: float
    begin_cpu_s: float
    end_cpu_s: float
    about: str
    """Of Node.step: `iteration phase`."""


def environment(directory: Path) -> dict[str, str]:
    """Return the environment with which a process writes its spans into `directory`."""
    paths = [str(Path(__file__).with_name("traced")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {DIRECTORY: str(directory), "PYTHONPATH": os.pathsep.join(paths)}


def read_spans(directory: Path) -> list[Span]:
    """Read all spans; a line that a kill left incomplete is skipped."""
    spans: list[Span] = []
    for path in sorted(directory.glob("*.jsonl")):
        kind, rank, pid, _suffix = path.name.split(".")
        for line in path.read_text().splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            spans.append(Span(f"{kind}.{pid}", int(rank) if rank else None, *fields))
    return spans


# In the traced process.


def begin() -> None:
    """Wrap the functions as their modules are imported, if the environment asks for it."""
    if directory := os.environ.get(DIRECTORY):
        writer = _Writer(Path(directory))
        sys.meta_path.insert(0, _Wrapping(writer))
        for module in SPANS.keys() & sys.modules.keys():
            _wrap_functions(sys.modules[module], SPANS[module], writer)


class _Writer:
    """Collects spans, and appends them to this process's file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lines: list[str] = []
        self._flushed_s = 0.0
        self._descriptor: int | None = None
        atexit.register(self.flush)
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lines, self._descriptor = [], None

    def add(self, name: str, begin: tuple[float, float], about: str) -> None:
        now_s = time.monotonic()
        span = [name, round(begin[0], 6), round(now_s, 6), round(begin[1], 6), round(time.process_time(), 6)]
        self._lines.append(json.dumps([*span, about]))
        if now_s - self._flushed_s > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self._flushed_s = time.monotonic()
        lines, self._lines = self._lines, []
        if not lines:
            return
        if self._descriptor is None:
            kind, rank = _identity(sys.orig_argv)
            path = self._directory / f"{kind}.{'' if rank is None else rank}.{os.getpid()}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._descriptor, "".join(f"{line}\n" for line in lines).encode())


def _identity(argv: Sequence[str]) -> tuple[str, int | None]:
    """Return the kind and rank of this process, by its command line."""
    forked_as = sys.argv[0] if sys.argv[:1] != argv[:1] else ""  # by trainer.job.forks
    if "coordinator.cli" in argv and ("--worker" in argv or "--master" in argv):
        return "node", int(argv[argv.index("--worker") + 1]) if "--worker" in argv else 0
    if "rollout.engines.embedded.server" in argv or forked_as.endswith("engines/embedded/server.py"):
        return "engine", None
    if "trainer" in argv or "RANK" in os.environ:
        return "trainer", int(os.environ["RANK"])
    return "other", None


class _Wrapping(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module of SPANS, and wraps its functions after its import."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SPANS:
            return None
        spec = next(filter(None, (f.find_spec(fullname, path, target) for f in self._others())), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap_functions(module, SPANS[fullname], self._writer)

            spec.loader.exec_module = exec_module
        return spec

    def _others(self) -> Iterator[Any]:
        return (finder for finder in sys.meta_path if finder is not self)


def _wrap_functions(module: ModuleType, names: Sequence[str], writer: _Writer) -> None:
    for name in names:
        holder, _, attribute = name.rpartition(".")
        owner = getattr(module, holder, None) if holder else module
        function = vars(owner).get(attribute) if owner is not None else None
        if function is None:
            print(f"not traced: {module.__name__} has no {name}", file=sys.stderr)
            continue
        setattr(owner, attribute, _wrapped(f"{module.__name__}.{name}", function, writer))


def _wrapped(name: str, function: Callable[..., Any], writer: _Writer) -> Callable[..., Any]:
    is_step = name == STEP

    def about(arguments: Sequence[Any]) -> str:
        return f"{arguments[1].number} {arguments[2].label}" if is_step else ""

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic(), time.process_time()
            try:
                return await function(*arguments, **named)
            finally:
                writer.add(name, began, about(arguments))

        return call_async

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic(), time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            writer.add(name, began, about(arguments))

    return call
