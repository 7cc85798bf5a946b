"""Trackers that metrics are sent to: TensorBoard, Weights & Biases, trackio, MLflow. One small class each."""

import importlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.journal.sample_tables import COLUMNS, columns
from coordinator.settings.loading import flatten, show
from coordinator.settings.tree import RunSettings


@dataclass(frozen=True)
class RunFacts:
    """What a tracker is told of the run. It is the same after a restart, so that its curves go on."""

    run_id: str
    directory: Path
    """The run directory; its name is the run's, and a tracker may have a directory of its own in it."""
    settings: RunSettings


class Tracker(Protocol):
    """A tracker. Raises whatever its library raises."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Take the values of an iteration, by name; the newest one may come a second time after a restart."""
        ...

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Take samples of an iteration: rows of COLUMNS, or with pictures behind them; `name`: what they are
        of, train or eval.
        """
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class TensorBoard:
    """Event files in <log-path>/tensorboard."""

    def __init__(self, run: RunFacts) -> None:
        tensorboardx: Any = importlib.import_module("tensorboardX")
        self._writer = tensorboardx.SummaryWriter(
            logdir=str(run.directory / "tensorboard"),
            filename_suffix=f".{secrets.token_hex(4)}",  # else two files of one second are one
        )

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """See Sink. A text, and pictures: TensorBoard has no tables."""
        import numpy as np  # which tensorboardX has imported

        text = "\n\n".join("\n".join(f"    {line}" for line in _lines(row)) for row in rows)
        self._writer.add_text(f"samples/{name}", text, iteration)
        shown = {row[1]: row[-1] for row in rows if len(row) > len(COLUMNS) and row[-1] is not None}
        for number, picture in enumerate(shown.values()):
            self._writer.add_image(
                f"samples/{name}/{number}", np.asarray(picture), iteration, dataformats="HWC"
            )
        self._writer.flush()

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases whose id is the run's; where it reports to is set as its users set it."""

    def __init__(self, run: RunFacts) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=run.settings.metrics.project,
            name=run.directory.name,
            id=run.run_id,
            resume="allow",
            config=run.settings.model_dump(mode="json"),
            dir=str(run.directory),
            settings={"console": "off"},  # what the node prints is its own
        )
        # Not W&B's own steps, which refuse to take one again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log({**values, "iteration": iteration})

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """See Sink."""
        table = self._wandb.Table(columns=columns(rows), data=_with_pictures(rows, self._wandb.Image))
        self._run.log({f"samples/{name}": table, "iteration": iteration})

    def close(self) -> None:
        """See Sink."""
        self._run.finish()


class Trackio:
    """A run of trackio, kept on this machine unless its user has set it up otherwise."""

    def __init__(self, run: RunFacts) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(
            project=run.settings.metrics.project,
            name=f"{run.directory.name}-{run.run_id}",  # it knows a run by its name alone
            resume="allow",
            config=run.settings.model_dump(mode="json"),
        )

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._trackio.log(dict(values), step=iteration)

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """See Sink."""
        shown, names = _with_pictures(rows, self._trackio.Image), columns(rows)
        table = self._trackio.Table(data=[dict(zip(names, row, strict=True)) for row in shown])
        self._trackio.log({f"samples_{name}": table}, step=iteration)

    def close(self) -> None:
        """See Sink."""
        self._trackio.finish()


class MLflow:
    """A run of MLflow at $MLFLOW_TRACKING_URI, in an experiment called like `metrics.project`."""

    TAG = "flagpost_run_id"
    _MOST = 100
    """Parameters, or metrics, of one request."""

    def __init__(self, run: RunFacts) -> None:
        self._entities: Any = importlib.import_module("mlflow.entities")
        mlflow: Any = importlib.import_module("mlflow")
        self._client, self._image = mlflow.MlflowClient(), mlflow.Image
        project = run.settings.metrics.project
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        runs = self._client.search_runs([place], filter_string=f"tags.{self.TAG} = '{run.run_id}'")
        if runs:  # the run goes on
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.TAG: run.run_id}
        self._id = self._client.create_run(place, run_name=run.directory.name, tags=tags).info.run_id
        settings = flatten(run.settings.model_dump(mode="json"))
        params = [self._entities.Param(key, show(value)[:500]) for key, value in settings]
        for begin in range(0, len(params), self._MOST):
            self._client.log_batch(self._id, params=params[begin : begin + self._MOST])

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(re.sub(r"[^\w./ -]", "_", name), value, now_ms, iteration)
            for name, value in values.items()
        ]
        for begin in range(0, len(metrics), self._MOST):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + self._MOST])

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """See Sink."""
        shown = _with_pictures(rows, self._image)
        table = {column: [row[at] for row in shown] for at, column in enumerate(columns(rows))}
        self._client.log_table(self._id, table, f"samples/{name}_{iteration:06}.json")

    def close(self) -> None:
        """See Sink."""
        self._client.set_terminated(self._id)


def _with_pictures(rows: Sequence[Sequence[Any]], image: Any) -> list[list[Any]]:
    """Return the rows with each picture as the tracker's own type for one."""
    return [
        [*row[: len(COLUMNS)], *(None if shown is None else image(shown) for shown in row[len(COLUMNS) :])]
        for row in rows
    ]


def _lines(row: Sequence[Any]) -> list[str]:
    """Write a sample for people, a line for each column of words and numbers."""
    return [f"{name}: {value!r}" for name, value in zip(COLUMNS, row, strict=False) if name != "iteration"]
