"""Where the metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio. One small class each.

A tracker that is slow, unreachable or broken must not hold a run. A thread feeds it; an error of it is logged
once and ends that tracker alone. metrics.jsonl has every line whatever happens here.
"""

import contextlib
import importlib.util
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.settings import MetricsSettings, RunSettings, SettingsError, SinkName

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""How long the end of a run waits for a tracker to take what is left."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of the run. It is the same after a restart, so that its curves go on."""

    run_id: str
    directory: Path
    """The run directory; its name is the run's, and a tracker may have a directory of its own in it."""
    settings: RunSettings


class Sink(Protocol):
    """A tracker. Raises whatever its library raises."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take the values of an iteration, by name; the newest one may come a second time after a restart."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class TensorBoard:
    """Event files in <log-path>/tensorboard."""

    def __init__(self, about: About) -> None:
        tensorboardx: Any = importlib.import_module("tensorboardX")
        self._writer = tensorboardx.SummaryWriter(
            logdir=str(about.directory / "tensorboard"),
            filename_suffix=f".{secrets.token_hex(4)}",  # else two files of one second are one
        )

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases whose id is the run's; where it reports to is set as its users set it."""

    def __init__(self, about: About) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=about.settings.metrics.project,
            name=about.directory.name,
            id=about.run_id,
            resume="allow",
            config=about.settings.model_dump(mode="json"),
            dir=str(about.directory),
            settings={"console": "off"},  # what the node prints is its own
        )
        # Not W&B's own steps, which refuse to take one again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log({**values, "iteration": iteration})

    def close(self) -> None:
        """See Sink."""
        self._run.finish()


class Trackio:
    """A run of trackio, kept on this machine unless its user has set it up otherwise."""

    def __init__(self, about: About) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(
            project=about.settings.metrics.project,
            name=f"{about.directory.name}-{about.run_id}",  # it knows a run by its name alone
            resume="allow",
            config=about.settings.model_dump(mode="json"),
        )

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._trackio.log(dict(values), step=iteration)

    def close(self) -> None:
        """See Sink."""
        self._trackio.finish()


SINKS: dict[SinkName, tuple[Callable[[About], Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (WandB, "wandb"),
    "trackio": (Trackio, "trackio"),
}
"""By name: the class, and the module that it needs."""


def check_sinks(settings: MetricsSettings) -> None:
    """SettingsError for a tracker whose library is not installed."""
    for name in settings.sinks:
        if importlib.util.find_spec(SINKS[name][1]) is None:
            raise SettingsError(
                f"metrics.sinks={name}: {SINKS[name][1]} is not installed; pip install -e '.[{name}]'"
            )


class Sinks:
    """The trackers of a run. They are opened by the first line, in a thread that feeds them."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._names = about.settings.metrics.sinks
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
        sinks: dict[SinkName, Sink] = {}
        for name in self._names:
            with _alone(name, sinks):
                sinks[name] = SINKS[name][0](self._about)
        while (line := self._lines.get()) is not None:
            for name in list(sinks):
                with _alone(name, sinks):
                    sinks[name].write(line["iteration"], scalars(line))
        for name in list(sinks):
            with _alone(name, sinks):
                sinks[name].close()


@contextlib.contextmanager
def _alone(name: SinkName, sinks: dict[SinkName, Sink]) -> Generator[None]:
    """What a tracker raises ends it, and nothing else."""
    try:
        yield
    except Exception as error:  # of somebody else's library
        log.warning("%s failed and gets no more metrics (metrics.jsonl does): %r", name, error)
        sinks.pop(name, None)


def scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a metrics line by name; `phase_seconds/training` for one inside another."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, int | float) and (prefix or name != "iteration"):
            found[f"{prefix}{name}"] = float(value)
    return found
