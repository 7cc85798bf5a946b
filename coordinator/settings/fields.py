"""The settings of a run by name, with their defaults, one class per concern; `rollout` and `trainer` define
their own.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from coordinator.settings.cluster import ClusterSettings
from rollout.settings import (
    GENERATED,
    TINY,
    EngineSettings,
    EvalSetSettings,
    EvalSettings,
    Mark,
    RolloutSettings,
    Settings,
)
from trainer.settings import TrainerSettings


class CheckpointSettings(Settings):
    """Which checkpoints are kept."""

    keep_last: Annotated[int, Field(ge=2)] = 3
    """Keep this many of the newest checkpoints; at least 2, so that one is left to fall back to."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep the checkpoint of every n-th iteration; null: none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this many with the best evaluation (without evaluations: with the best sampled reward)."""
    best_by: str | None = None
    """The best by the score of this set of `eval.sets`; null: by `eval_reward`."""
    head_start: bool | None = None
    """Copy new weights to each node before the checkpoint is durable, so that engines load them and generate
    for the next iteration meanwhile; null: where the run directory is on a shared filesystem. It has no
    effect with adapters, two crews, servers of your own, or `cluster.max_async_level` above 0."""
    delta: bool = False
    """Write beside the weights what has changed in them, losslessly, if that is at most a quarter of their
    size: nodes that have a copy of the policy before read this alone. Training ranks keep what they have
    written in host memory for it."""


class TrajectorySettings(Settings):
    """Which trajectories and batches are kept, once they have been trained on."""

    keep_last: Annotated[int, Field(ge=1)] | None = None
    """Keep those of this many of the newest iterations, and older ones with which a training may have to be
    repeated after a restart; null: all. What was not trained on yet stays."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep those of every n-th iteration; null: none."""

    @model_validator(mode="after")
    def _every_is_beside_last(self) -> "TrajectorySettings":
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                f"trajectories.keep_every={self.keep_every} says what stays beside the newest, but all stay; "
                "add trajectories.keep_last, or leave it out"
            )
        return self


SinkName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


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


class TinySettings(Settings):
    """The built-in model."""

    warmup_steps: Annotated[int, Field(ge=0)] = 800
    """Supervised steps before RL; 0 leaves random weights."""


class Fields(Settings):
    """All settings of a run."""

    model: str = TINY
    """Hugging Face directory or id, or builtin:tiny."""
    tasks: str = "builtin:arithmetic"
    """The training tasks: a file (JSON lines, .csv, .parquet, .arrow), a directory or a pattern of such
    files, hf:NAME:CONFIG:SPLIT, builtin:arithmetic, builtin:products, builtin:shapes,
    reasoning_gym:NAME,PARAMETER=VALUE,..., verifiers:NAME,PARAMETER=VALUE,...,
    gym:MODULE:CLASS,PARAMETER=VALUE,..., or openenv:URL,PARAMETER=VALUE,..."""
    columns: dict[str, str] = Field(default={})
    """Which column of the data is a field of the task: columns.prompt=question, columns.answer=solution."""
    eval_tasks: str | None = None
    """As `tasks`, for evaluation; default: what `tasks` generates for evaluation, if it is not a file."""
    data_path: Annotated[str | None, Mark.PER_MACHINE] = None
    """Read-only shared data: relative paths of task files and models start here, and HF_HOME is below it."""
    rl_phase: Literal["both", "rollout", "update"] = "both"
    """Which half of an iteration runs."""
    rollout_split: Literal["train-only", "eval-only"] | None = None
    """Do only this part of the rollout; default: both."""
    iterations: Annotated[int, Field(ge=1)] | None = None
    """Stop after this iteration; default: go on until stopped."""
    cluster: ClusterSettings = ClusterSettings()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    engine: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    trajectories: TrajectorySettings = TrajectorySettings()
    metrics: MetricsSettings = MetricsSettings()
    tiny: TinySettings = TinySettings()

    @property
    def eval_sets(self) -> dict[str, EvalSetSettings]:
        """The named sets of the evaluation, by name in this order, each with what it inherits."""
        columns = self.eval.columns or self.columns
        sets = sorted(self.eval.sets.items())
        return {name: eval_set.filled(self.eval, self.rollout, columns) for name, eval_set in sets}

    @property
    def eval_columns(self) -> dict[str, str]:
        """Which column of the evaluation's data is a field of its tasks."""
        is_generated = (self.evaluation_tasks or "").startswith(GENERATED)
        return {} if is_generated else self.eval.columns or self.columns

    @property
    def evaluation_tasks(self) -> str | None:
        """The source of the evaluation tasks; None for no evaluation."""
        if self.eval_tasks is None and self.tasks.startswith(GENERATED):
            return self.tasks
        return self.eval_tasks
