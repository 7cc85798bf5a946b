"""Hand the metrics, and samples, to trackers, beside metrics.jsonl.

A tracker that is slow, unreachable or broken must not hold a run. A thread feeds it; an error of it is logged
once and ends that tracker alone. metrics.jsonl has every line whatever happens here.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from coordinator.directory.layout import Kind
from coordinator.journal import sample_tables
from coordinator.journal.tracker_kinds import MLflow, RunFacts, TensorBoard, Tracker, Trackio, WandB
from coordinator.settings.metrics import MetricsSettings, SinkName
from coordinator.settings.tree import SettingsError
from rollout.module_search import is_installed

log = logging.getLogger(__name__)

MLFLOW = "MLFLOW_TRACKING_URI"
KINDS: tuple[Kind, ...] = ("train", "eval")
CLOSE_TIMEOUT_S = 30.0
"""How long the end of a run waits for a tracker to take what is left."""


SINKS: dict[SinkName, tuple[Callable[[RunFacts], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (WandB, "wandb"),
    "trackio": (Trackio, "trackio"),
    "mlflow": (MLflow, "mlflow"),
}
"""By name: the class, and the module that it needs."""


def check_sinks(settings: MetricsSettings) -> None:
    """SettingsError for a tracker whose library is not installed, or that nobody has said the place of."""
    for name in settings.sinks:
        if not is_installed(SINKS[name][1]):
            raise SettingsError(
                f"metrics.sinks={name}: {SINKS[name][1]} is not installed; pip install -e '.[{name}]'"
            )
    if "mlflow" in settings.sinks and not os.environ.get(MLFLOW):
        raise SettingsError(
            f"metrics.sinks=mlflow: no server is named; set the environment variable {MLFLOW}, e.g. to "
            "http://127.0.0.1:5000"
        )


class Sinks:
    """The trackers of a run. They are opened by the first line, in a thread that feeds them."""

    def __init__(self, run: RunFacts) -> None:
        self._about = run
        self._names = run.settings.metrics.sinks
        self._lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._taken = 0
        self._thread: threading.Thread | None = None

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Hand on the lines of metrics.jsonl that are newer than those already handed on by this process."""
        if not self._names:
            return
        for line in lines:
            if line["iteration"] > self._taken:
                self._taken = line["iteration"]
                self._lines.put(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, name="sinks", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the trackers take what is left."""
        if self._thread is None:
            return
        self._lines.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s did not take all metrics within %.0f s; metrics.jsonl has them",
                        ", ".join(self._names), timeout_s)  # fmt: skip
        self._thread = None

    def _feed(self) -> None:
        sinks: dict[SinkName, Tracker] = {}
        for name in self._names:
            with _alone(name, sinks):
                sinks[name] = SINKS[name][0](self._about)
        while (line := self._lines.get()) is not None:
            for name in list(sinks):
                with _alone(name, sinks):
                    sinks[name].write(line["iteration"], scalars(line))
            self._send_samples(line["iteration"], sinks)
        for name in list(sinks):
            with _alone(name, sinks):
                sinks[name].close()

    def _send_samples(self, iteration: int, sinks: dict[SinkName, Tracker]) -> None:
        groups = self._about.settings.metrics.samples
        for kind in KINDS if groups else ():
            try:
                rows = sample_tables.rows(self._about.directory, kind, iteration, groups)
            except (
                OSError,
                ValueError,
                KeyError,
            ) as error:  # they are for people
                log.warning("the samples of iteration %d are not sent: %s", iteration, error)
                continue
            for name in list(sinks) if rows else ():
                with _alone(name, sinks):
                    sinks[name].write_samples(iteration, kind, rows)


@contextlib.contextmanager
def _alone(name: SinkName, sinks: dict[SinkName, Tracker]) -> Generator[None]:
    """What a tracker raises ends it, and nothing else."""
    try:
        yield
    except Exception as error:  # of somebody else's library
        log.warning("%s failed and gets no more metrics (metrics.jsonl does): %r", name, error)
        sinks.pop(name, None)


def scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a metrics line by name; `phase_seconds/training` for one inside another."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"{prefix}{name}/")  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, int | float) and (prefix or name != "iteration"):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers
