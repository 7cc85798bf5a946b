"""Settings of what is kept of a run: checkpoints, trajectories."""

from typing import Annotated

from pydantic import Field, model_validator

from rollout.settings_tree import Settings


class CheckpointSettings(Settings):
    """Which checkpoints are kept, and how nodes get their weights."""

    keep_last: Annotated[int, Field(ge=2)] = 3
    """Keep this many of the newest checkpoints; at least 2, so that training can fall back."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep the checkpoint of every n-th iteration; null: none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this many with the best evaluation (without evaluations: with the best sampled reward)."""
    best_by: str | None = None
    """The best by the score of this set of `eval.sets`; null: by `eval_reward`."""
    head_start: bool | None = None
    """Copy new weights to each node before the checkpoint is durable, so that engines generate for the next
    iteration meanwhile; null: on a shared filesystem. Not with adapters, two crews, servers of your own, or
    `cluster.max_async_level` above 0."""
    delta: bool = False
    """Also write what has changed in the weights, losslessly, if that is at most a quarter of their size:
    nodes that have the policy before read this alone. Training ranks keep the last weights in host memory for
    it."""


class TrajectorySettings(Settings):
    """Which trajectories and batches are kept, once they have been trained on."""

    keep_last: Annotated[int, Field(ge=1)] | None = None
    """Keep those of this many of the newest iterations, and older ones that a training may have to repeat
    after a restart; null: all. What was not trained on yet stays."""
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
