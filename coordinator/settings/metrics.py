"""Settings of where metrics are sent."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from rollout.settings_tree import Settings

SinkName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
SINKS: tuple[str, ...] = get_args(SinkName)


def _names(value: Any) -> Any:
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


class MetricsSettings(Settings):
    """Where the metrics are sent, in addition to metrics.jsonl."""

    sinks: Annotated[tuple[SinkName, ...], BeforeValidator(_names)] = ()
    """tensorboard, wandb, trackio, mlflow; several separated by commas."""
    project: str = "flagpost"
    """The run's project at W&B or trackio, its experiment at MLflow; the run is named after its log path."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Send the samples of this many groups of each iteration, and of each evaluation, as a table too."""
