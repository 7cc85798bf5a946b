"""The settings of a run, which agree with each other."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from coordinator.settings.agreement import RULES
from coordinator.settings.fields import SettingFields
from coordinator.settings.placement import Crew

RunKind = Literal["both", "rollout", "update", "eval"]
"""What a run does in each iteration; a metrics line says it too."""


class SettingsError(ValueError):
    """A setting is wrong: one line that says which, with which value, and what to do."""


class RunSettings(SettingFields):
    """All settings of a run; the master publishes them."""

    @model_validator(mode="before")
    @classmethod
    def _answers_are_written(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fine-tuning, DPO and KTO train on what the tasks have, unless the rollout says otherwise."""
        trainer, rollout = (values.get(name, {}) for name in ("trainer", "rollout"))
        written: dict[Any, tuple[str, int]] = {
            "sft": ("demonstration", 1),
            "dpo": ("preference", 2),
            "kto": ("labelled", 1),
        }
        algorithm = trainer.get("algorithm") if isinstance(trainer, Mapping) else None  # pyright: ignore
        if algorithm not in written:
            return values
        environment, samples = written[algorithm]
        return {**values, "rollout": {"environment": environment, "samples_per_task": samples, **rollout}}

    @model_validator(mode="before")
    @classmethod
    def _warm_up_is_counted(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse a share of the steps, which other trainers have, with the number that it is."""
        trainer: Any = values.get("trainer", {})
        share = trainer.get("warmup_steps") if isinstance(trainer, Mapping) else None  # pyright: ignore
        if not isinstance(share, float) or not 0 < share < 1:
            return values
        try:
            steps = cls.model_validate({**values, "trainer": {**trainer, "warmup_steps": 0}}).optimizer_steps
        except ValidationError:  # which is told first
            return values
        count = "so many steps of the run" if steps is None else f"{math.ceil(share * steps)} of its {steps}"
        raise ValueError(
            f"trainer.warmup_steps={share:g} is a share, as TRL's warmup_ratio; it is a number of optimizer "
            f"steps here: give {count}"
        )

    @model_validator(mode="after")
    def _settings_agree(self) -> "RunSettings":
        for refuse in RULES:
            refuse(self)
        return self

    @classmethod
    def published(cls, document: Mapping[str, Any]) -> Self:
        """Read the settings of an epoch record; SettingsError if another version of flagpost wrote them."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise SettingsError(
                f"the run's settings were published by another version of flagpost ({where}: "
                f"{error.errors()[0]['msg']}); use the same version on all nodes"
            ) from None

    def of_crew(self, crew: Crew, machines: Sequence[int] = ()) -> "RunSettings":
        """Return the settings that a crew of these machines goes by: its half of an iteration, its nodes."""
        if crew == "main":
            return self
        half = {"rollout": "rollout", "train": "update"}[crew]
        weights, cluster = self.cluster.rank_weights, self.cluster
        if machines:
            crew_weights = tuple(weights[machine] for machine in machines) if weights else None
            cluster = cluster.model_copy(update={"num_nodes": len(machines), "rank_weights": crew_weights})
        return self.model_copy(update={"rl_phase": half, "cluster": cluster})

    @property
    def optimizer_steps(self) -> int | None:
        """Steps of the optimizer in the whole run if no group is lost; None: the run has no end."""
        if self.iterations is None:
            return None
        samples = self.rollout.tasks_per_iteration * self.rollout.samples_per_task
        return self.iterations * self.trainer.passes * math.ceil(samples / self.trainer.global_batch_size)

    @property
    def claims(self) -> bool:
        """Whether nodes claim their groups; else these are split by weight."""
        is_chosen = self.rollout.claims
        return is_chosen if is_chosen is not None else self.cluster.rank_weights is None

    @property
    def kind(self) -> RunKind:
        """What the run does in each iteration: both halves, one of them, or an evaluation alone."""
        return "eval" if self.rollout_split == "eval-only" else self.rl_phase
