"""The settings of a run by name, with their defaults, one class per concern; `rollout` and `trainer` define
their own.
"""

from typing import Annotated, Literal

from pydantic import Field

from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.keeping import CheckpointSettings, TrajectorySettings
from coordinator.settings.metrics import MetricsSettings
from rollout.eval_settings import EvalSetSettings, EvalSettings
from rollout.settings import GENERATED, TINY, EngineSettings, RolloutSettings
from rollout.settings_tree import Mark, Settings
from trainer.settings import TrainerSettings


class TinySettings(Settings):
    """The built-in model."""

    warmup_steps: Annotated[int, Field(ge=0)] = 800
    """Supervised steps before RL; 0 leaves random weights."""


class SettingFields(Settings):
    """All settings of a run."""

    model: str = TINY
    """Hugging Face directory or id, or builtin:tiny."""
    tasks: str = "builtin:arithmetic"
    """The training tasks: a file (JSON lines, .csv, .parquet, .arrow), a directory or a pattern of such
    files, hf:NAME:CONFIG:SPLIT, builtin:arithmetic, builtin:products, builtin:shapes,
    reasoning_gym:NAME,PARAMETER=VALUE,..., verifiers:NAME,PARAMETER=VALUE,...,
    gym:MODULE:CLASS,PARAMETER=VALUE,..., or openenv:URL,PARAMETER=VALUE,..."""
    columns: dict[str, str] = Field(default={})
    """Maps fields of the task to columns of the data: columns.prompt=question, columns.answer=solution."""
    eval_tasks: str | None = None
    """Evaluation tasks, as `tasks`; default: those that `tasks` generates for evaluation, if it is not a
    file.
    """
    data_path: Annotated[str | None, Mark.PER_MACHINE] = None
    """Read-only shared data: relative paths of task files and models start here, and HF_HOME is below it."""
    rl_phase: Literal["both", "rollout", "update"] = "both"
    """Run only one half of an iteration, or both."""
    rollout_split: Literal["train-only", "eval-only"] | None = None
    """Do only this part of the rollout; default: both."""
    iterations: Annotated[int, Field(ge=1)] | None = None
    """Stop after this iteration; default: run until stopped."""
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
