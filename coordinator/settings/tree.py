"""The settings tree of a run, one class per concern; `rollout` and `trainer` define their own."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.placement import Crew
from rollout.settings import (
    GENERATED,
    JOIN,
    NAME,
    PROGRAMS,
    SELF,
    WRITTEN,
    EngineSettings,
    EvalSetSettings,
    EvalSettings,
    RolloutSettings,
    Settings,
)
from trainer.settings import TrainerSettings

TINY = "builtin:tiny"

RunKind = Literal["both", "rollout", "update", "eval"]
"""What a run does in each iteration; a metrics line says it too."""


class SettingsError(ValueError):
    """A setting is wrong: one line that says which, with which value, and what to do."""


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


class RunSettings(Settings):
    """All settings of a run; the master publishes them."""

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
    data_path: str | None = None
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

    @model_validator(mode="before")
    @classmethod
    def _answers_are_written(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fine-tuning and DPO train on what the tasks have, unless the rollout says otherwise."""
        trainer, rollout = (values.get(name, {}) for name in ("trainer", "rollout"))
        written: dict[Any, tuple[str, int]] = {"sft": ("demonstration", 1), "dpo": ("preference", 2)}
        algorithm = trainer.get("algorithm") if isinstance(trainer, Mapping) else None  # pyright: ignore
        if algorithm not in written:
            return values
        environment, samples = written[algorithm]
        return {**values, "rollout": {"environment": environment, "samples_per_task": samples, **rollout}}

    @model_validator(mode="after")
    def _columns_are_of_data(self) -> "RunSettings":
        for key, columns, option, source in (
            ("columns", self.columns, "--tasks", self.tasks),
            ("eval.columns", self.eval.columns, "--eval-tasks", self.evaluation_tasks),
        ):
            if columns and (source is None or source.startswith(GENERATED)):
                raise ValueError(
                    f"{key}.{next(iter(columns))} names a column of data, but {option} is "
                    f"{source or 'not given'}, which has none; give {option} FILE, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _sets_have_names(self) -> "RunSettings":
        for name, eval_set in self.eval.sets.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"eval.sets.{name}: name a set with letters, digits, _ and - only")
            if eval_set.columns and eval_set.tasks.startswith(GENERATED):
                raise ValueError(
                    f"eval.sets.{name}.columns.{next(iter(eval_set.columns))} names a column of data, but "
                    f"eval.sets.{name}.tasks is {eval_set.tasks}, which has none; leave it out"
                )
        best_by = self.checkpoints.best_by
        if best_by is not None and best_by not in self.eval.sets:
            there = ", ".join(self.eval.sets) or "none"
            raise ValueError(
                f"checkpoints.best_by={best_by} is no set of eval.sets (there is {there}); name one"
            )
        return self

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

    @model_validator(mode="after")
    def _split_fits(self) -> "RunSettings":
        if self.rollout_split and self.rl_phase == "update":
            raise ValueError(
                f"--rollout-split {self.rollout_split} needs a rollout, but --rl-phase is update; "
                "leave one of them out"
            )
        half = f"--rl-phase {self.rl_phase}" if self.rl_phase != "both" else ""
        half = f"--rollout-split {self.rollout_split}" if self.rollout_split else half
        if self.cluster.place and half:
            raise ValueError(f"{half} does one part of each iteration, but --place has all; leave one out")
        if self.rollout_split == "eval-only" and self.rl_phase != "rollout":
            raise ValueError("--rollout-split eval-only makes nothing to train on; add --rl-phase rollout")
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "RunSettings":
        if self.trainer.schedule != "constant" and self.iterations is None:
            raise ValueError(
                f"trainer.schedule={self.trainer.schedule} ends with the run, but the run has no end: give "
                "--iterations, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _delta_is_of_a_whole_model(self) -> "RunSettings":
        if self.checkpoints.delta and self.trainer.lora.rank:
            raise ValueError(
                f"checkpoints.delta=true with trainer.lora.rank={self.trainer.lora.rank}: a checkpoint holds "
                "only the adapter, which is small; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _replay_window_is_kept(self) -> "RunSettings":
        kept, window = self.trajectories.keep_last, self.trainer.replay_window
        if kept is not None and kept < window:
            raise ValueError(
                f"trajectories.keep_last={kept} is less than trainer.replay_window={window}: a batch needs "
                f"trajectories of {window} iterations; give at least {window}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _older_samples_are_corrected(self) -> "RunSettings":
        level, segment, trainer = self.cluster.max_async_level, self.rollout.segment_tokens, self.trainer
        option = f"--max-async-level {level}" if level else f"rollout.segment_tokens={segment}"
        if (level or segment) and trainer.engine_correction == "off" and trainer.clip != "likelihood":
            raise ValueError(
                f"{option} trains on samples of older policies, for which trainer."
                "engine_correction=off does not correct; use truncated or masked, or leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _segments_can_go_on(self) -> "RunSettings":
        rollout = self.rollout
        if rollout.segment_tokens is None:
            return self
        for is_given, other, reason in (
            (rollout.environment != "single_turn", f"rollout.environment={rollout.environment}",
             "only a single turn can go on in another iteration"),
            (rollout.stop, "rollout.stop", "a stop string that is cut in two would not be seen"),
            (rollout.over_sample > 1, f"rollout.over_sample={rollout.over_sample:g}",
             "what was begun would be thrown away"),
            (rollout.dynamic_sampling, "rollout.dynamic_sampling=true",
             "an iteration would wait for the rewards of unfinished groups"),
        ):  # fmt: skip
            if is_given:
                raise ValueError(
                    f"rollout.segment_tokens={rollout.segment_tokens} with {other}: {reason}; leave one of "
                    "them out"
                )
        return self

    @model_validator(mode="after")
    def _reasoning_has_an_end(self) -> "RunSettings":
        rollout = self.rollout
        if rollout.thinking_tokens is None:
            return self
        for is_given, other, reason in (
            (rollout.reasoning_end is None, "without rollout.reasoning_end",
             "nothing says how reasoning ends; add e.g. rollout.reasoning_end='</think>'"),
            (rollout.environment != "single_turn", f"with rollout.environment={rollout.environment}",
             "it is for single_turn; leave one of them out"),
            (rollout.segment_tokens is not None, f"with rollout.segment_tokens={rollout.segment_tokens}",
             "a sample that is cut goes on in the next iteration; leave one of them out"),
            (rollout.thinking_tokens >= rollout.max_tokens, f"with rollout.max_tokens={rollout.max_tokens}",
             "nothing is left for the answer; give fewer"),
        ):  # fmt: skip
            if is_given:
                raise ValueError(f"rollout.thinking_tokens={rollout.thinking_tokens} {other}: {reason}")
        sets = {f"eval.sets.{name}.max_tokens": eval_set for name, eval_set in self.eval_sets.items()}
        longest = {
            name: eval_set.max_tokens
            for name, eval_set in sets.items()
            if eval_set.environment == "single_turn"
        }
        for name, most in {"eval.max_tokens": self.eval.max_tokens, **longest}.items():
            if most is not None and most <= rollout.thinking_tokens:
                raise ValueError(
                    f"rollout.thinking_tokens={rollout.thinking_tokens} with {name}={most}: nothing is left "
                    "for the answer; give fewer, or raise the other"
                )
        return self

    @model_validator(mode="after")
    def _prompts_can_be_changed(self) -> "RunSettings":
        rollout, sets = self.rollout, self.eval_sets
        environments = {f"eval.sets.{name}.environment": str(sets[name].environment) for name in sets}
        for name, environment in {"rollout.environment": rollout.environment, **environments}.items():
            if rollout.system_prompt is not None and environment.startswith(PROGRAMS):
                raise ValueError(
                    f"rollout.system_prompt with {name}={environment}: that program writes its messages "
                    "itself; leave one of them out"
                )
        if rollout.max_prompt_tokens is not None and self.model == TINY:
            raise ValueError(
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} with --model {TINY}: its tokenizer "
                "is not made yet when a run starts; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_advantages(self) -> "RunSettings":
        alone = self.rollout.samples_per_task < 2 and self.trainer.advantage not in ("one", "zero")
        if self.rl_phase == "both" and alone:
            raise ValueError(
                f"rollout.samples_per_task={self.rollout.samples_per_task}: a group of one has no "
                "advantage, so nothing would be learnt; give at least 2, or --rl-phase rollout"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_several(self) -> "RunSettings":
        reward, environment = self.rollout.reward, self.rollout.environment
        gives_its_own = environment in WRITTEN or environment.startswith(PROGRAMS)
        if self.trainer.advantage == "decoupled" and (gives_its_own or JOIN not in reward):
            where = f"environment={environment}" if gives_its_own else f"reward={reward}"
            raise ValueError(
                f"trainer.advantage=decoupled with rollout.{where}: there are not several rewards to "
                'standardise; give some, e.g. --reward "math=1 + length=0.1", or leave it out'
            )
        return self

    @model_validator(mode="after")
    def _written_answers_are_not_sampled(self) -> "RunSettings":
        environment, trainer = self.rollout.environment, self.trainer
        if environment not in WRITTEN:
            return self
        preset = {"demonstration": "sft", "preference": "dpo"}[environment]
        if self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g}: what rollout.environment={environment} "
                "gives is not sampled, and its likelihood is trained at temperature 1; leave it out"
            )
        if trainer.clip != "likelihood" or trainer.engine_correction != "off":
            raise ValueError(
                f"rollout.environment={environment} has no logprobs of an engine, which trainer.algorithm="
                f"{trainer.algorithm} needs (trainer.clip={trainer.clip}, "
                f"trainer.engine_correction={trainer.engine_correction}); add trainer.algorithm={preset}"
            )
        if environment == "preference" and trainer.advantage == "one" and trainer.reward_threshold is None:
            raise ValueError(
                f"rollout.environment=preference with trainer.algorithm={trainer.algorithm} would train on "
                "the rejected answers too; add trainer.algorithm=dpo, or trainer.reward_threshold=1"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_asked(self) -> "RunSettings":
        rollout, trainer, level = self.rollout, self.trainer, self.cluster.max_async_level
        if trainer.kl == "off" and trainer.advantage == "zero":
            raise ValueError(
                "trainer.advantage=zero with trainer.kl=off learns nothing; leave one of them out, or give "
                "trainer.kl=k1"
            )
        begins_itself = rollout.environment in WRITTEN or rollout.environment.startswith(PROGRAMS)
        if begins_itself and (rollout.teacher or "").startswith(SELF):
            raise ValueError(
                f"rollout.teacher={rollout.teacher}: in rollout.environment={rollout.environment} no prompt "
                "is a task's own, so there is no place for its hint; leave one of them out"
            )
        if trainer.kl == "off" or trainer.kl_to != "teacher":
            return self
        if rollout.environment in WRITTEN and trainer.kl_in == "loss" and trainer.kl == "k1":
            raise ValueError(
                f"trainer.kl=k1 is for samples of the policy, and rollout.environment={rollout.environment} "
                "has written ones; leave one of them out"
            )
        if rollout.teacher is None and self.rl_phase == "both":
            raise ValueError(
                "trainer.kl_to=teacher needs a teacher; give rollout.teacher=http://HOST:PORT/v1, a server "
                "whose model has the same tokenizer, or self:FIELD"
            )
        if rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={rollout.temperature:g}: the teacher's logprobs are of temperature 1, "
                "and cannot be compared with the policy's; leave it out"
            )
        if (level or rollout.segment_tokens or trainer.replay_window > 1) and trainer.kl_in == "loss":
            raise ValueError(
                "trainer.kl_to=teacher with samples of older policies, for whose age trainer.kl_in=loss does "
                "not correct; add trainer.kl_in=token_reward, trainer.clip=ppo and "
                "trainer.engine_correction=truncated"
            )
        return self

    @model_validator(mode="after")
    def _flat_groups_count(self) -> "RunSettings":
        each = [self.trainer, *map(self.trainer.of_source, self.trainer.sources)]
        if self.rollout.dynamic_sampling and any(one.advantage in ("one", "zero") for one in each):
            raise ValueError(
                f"rollout.dynamic_sampling replaces groups of equal rewards, which trainer.algorithm="
                f"{self.trainer.algorithm} learns from; leave one of them out"
            )
        if self.rollout.dynamic_sampling and any(one.keep_flat_groups for one in each):
            raise ValueError(
                "rollout.dynamic_sampling replaces groups of equal rewards, which trainer.algorithm="
                f"{self.trainer.algorithm} would count beside those that replace them; add "
                "trainer.keep_flat_groups=false, or leave rollout.dynamic_sampling out"
            )
        return self

    @model_validator(mode="after")
    def _groups_vary(self) -> "RunSettings":
        if self.rollout.dynamic_sampling and self.rollout.samples_per_task < 2:
            raise ValueError(
                f"rollout.samples_per_task={self.rollout.samples_per_task}: a group of one never varies, so "
                "rollout.dynamic_sampling would replace every group; give at least 2"
            )
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
    def claims(self) -> bool:
        """Whether nodes claim their groups; else these are split by weight."""
        is_chosen = self.rollout.claims
        return is_chosen if is_chosen is not None else self.cluster.rank_weights is None

    @property
    def kind(self) -> RunKind:
        """What the run does in each iteration: both halves, one of them, or an evaluation alone."""
        return "eval" if self.rollout_split == "eval-only" else self.rl_phase

    @property
    def evaluation_tasks(self) -> str | None:
        """The source of the evaluation tasks; None for no evaluation."""
        if self.eval_tasks is None and self.tasks.startswith(GENERATED):
            return self.tasks
        return self.eval_tasks
