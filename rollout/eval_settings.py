"""Settings of evaluation. Importing this never imports torch, vLLM or transformers."""

# ruff: noqa: RUF012  (pydantic gives each object a copy of a default)

from functools import partial
from typing import Annotated, Self

from pydantic import BeforeValidator, Field

from rollout.settings import GENERATED, WRITTEN, RolloutSettings, joined
from rollout.settings_tree import Settings, nested


class EvalSetSettings(Settings):
    """A named set of evaluation tasks, with a score of its own. What is not given is as in `eval`, then as in
    `rollout`.
    """

    tasks: Annotated[str, Field(min_length=1)]
    """The set's `eval_tasks`."""
    columns: dict[str, str] = {}
    """The set's `eval.columns`."""
    reward: Annotated[str | None, BeforeValidator(joined)] = None
    """The set's `rollout.reward`."""
    environment: str | None = None
    """The set's `rollout.environment`."""
    samples_per_task: Annotated[int, Field(ge=1)] | None = None
    """The set's `eval.samples_per_task`."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """The set's `eval.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """The set's `eval.top_p`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """The set's `eval.top_k`."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """The set's `eval.min_p`."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The set's `eval.max_tokens`."""
    success: float | None = None
    """The set's `eval.success`."""
    max_tasks: Annotated[int, Field(ge=1)] | None = None
    """The set's `eval.max_tasks`."""

    def filled(self, evaluation: "EvalSettings", rollout: RolloutSettings, columns: dict[str, str]) -> Self:
        """Return the set with what it inherits; only generated tasks have no columns. Demonstrations do not
        measure a policy: in their place it answers in a single turn.
        """
        inherited = {
            "columns": {} if self.tasks.startswith(GENERATED) else columns,
            "reward": rollout.scoring,
            "environment": rollout.environment,
            "samples_per_task": evaluation.samples_per_task,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            "top_k": evaluation.top_k,
            "min_p": evaluation.min_p,
            "max_tokens": evaluation.max_tokens or rollout.max_tokens,
            "success": evaluation.success,
            "max_tasks": evaluation.max_tasks,
        }
        chosen = {name: value for name in inherited if (value := getattr(self, name)) not in (None, {})}
        filled = {**inherited, **chosen}
        if filled["environment"] in WRITTEN:
            filled["environment"] = "single_turn"
        return self.model_copy(update=filled)


class EvalSettings(Settings):
    """When and how the policy is evaluated, on tasks of its own."""

    interval: Annotated[int, Field(ge=0)] = 10
    """Evaluate in iteration 1 and every `interval` iterations after it; 0: never."""
    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Samples per evaluation task; more make the score steadier."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Evaluation's `rollout.top_p`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Evaluation's `rollout.top_k`."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Evaluation's `rollout.min_p`."""
    success: float = 1.0
    """A sample with this reward or more has solved its task; pass@k counts these."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of a completion in an evaluation; null: as in training."""
    max_tasks: Annotated[int, Field(ge=1)] = 512
    """Evaluate on at most the first `max_tasks` tasks."""
    columns: dict[str, str] = {}
    """The setting `columns` for the evaluation tasks; default: the same."""
    sets: Annotated[dict[str, EvalSetSettings], BeforeValidator(partial(nested, "eval.sets"))] = {}
    """Further sets of tasks, by a name of your own: see `eval.sets.NAME`."""
