"""The settings tree of a run, one class per concern; `rollout` and `trainer` define their own."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from coordinator.groups import Groups, GroupSettings, nested, refuse_misfits
from coordinator.placement import Crew, parse_place
from rollout.settings import GENERATED, EngineSettings, EvalSettings, RolloutSettings, Settings
from trainer.settings import TrainerSettings

TINY = "builtin:tiny"

RunKind = Literal["both", "rollout", "update", "eval"]
"""What a run does in each iteration; a metrics line says it too."""


BEATS_PER_S = 50.0
"""How many heartbeats a second all nodes together write, unless they must beat more often to be believed."""
LISTINGS_PER_S = 1000.0
"""How many listings a second all nodes together make while they wait for long."""


class SettingsError(ValueError):
    """A setting is wrong: one line that says which, with which value, and what to do."""


def parse_weights(text: str) -> list[float]:
    """Parse `2,1,1`; SettingsError for an item that is not a positive number."""
    weights: list[float] = []
    for item in text.split(","):
        try:
            weights.append(float(item))
        except ValueError:
            raise SettingsError(
                f"--rank-weights {text}: '{item}' is not a number; give one per node, e.g. 2,1,1"
            ) from None
        if not 0 < weights[-1] < float("inf"):
            raise SettingsError(
                f"--rank-weights {text}: '{item}' is not positive; a node without work is left out"
            )
    return weights


def _weights(given: Any) -> Any:
    return parse_weights(given) if isinstance(given, str) else given


def _gpus(given: Any) -> Any:
    """Parse `32` or `8,4,4` into a list of numbers."""
    if isinstance(given, int):
        return [given]
    if not isinstance(given, str):
        return given
    items = [item.strip() for item in given.split(",")]
    for item in items:
        if not item.isdecimal():
            raise SettingsError(
                f"--expect-gpus {given}: '{item}' is no number of GPUs; give the total, e.g. 32, or one "
                "number per node, e.g. 8,8,4"
            )
    return [int(item) for item in items]


def _texts(given: Any) -> Any:
    return given.split() if isinstance(given, str) else given


class ClusterSettings(Settings):
    """The nodes, and how long they wait for each other."""

    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes of the run, the master included."""
    rank_weights: Annotated[tuple[float, ...] | None, BeforeValidator(_weights)] = None
    """One positive number per node: its share of the tasks and of the training tokens; default: equal."""
    expect_gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_gpus)] = None
    """GPUs that must be there before work starts: the total of all nodes, or one number per node."""
    place: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """Devices that generate and devices that train, e.g. rollout=0-5 and train=6,7: two crews, which work at
    the same time. A device is a GPU, or a node without GPUs; default: all do both, in turns."""
    beat_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two heartbeats of a node; with more than a hundred nodes they are rarer."""
    node_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A node is lost when its heartbeat has not changed for longer."""
    rejoin_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long nodes wait for the others to come, or to come back."""
    poll_max_s: Annotated[float, Field(gt=0)] = 0.5
    """Longest pause between two listings while a node waits; with hundreds of nodes it is longer."""
    local_dir: str | None = None
    """A directory on the node's own disk, for copies of models that are on a shared one; default: $TMPDIR."""
    max_async_level: Annotated[int, Field(ge=0)] = 0
    """Iteration i is sampled by exactly the policy of iteration max(0, i - 1 - max_async_level); 0: always by
    the newest."""
    on_node_failure: Literal["wait", "shrink", "abort"] = "wait"
    """When a node is lost: wait until it is back, go on with those that are left, or end (exit code 3)."""
    groups: Annotated[Groups, BeforeValidator(nested)] = Field(default={})
    """Nodes that differ from the others, by a name of your own: see `cluster.groups.NAME`."""

    @property
    def beat_interval_s(self) -> float:
        """Seconds between two heartbeats: beat_s, or more where many nodes share the directory."""
        return max(self.beat_s, min(self.num_nodes / BEATS_PER_S, self.node_timeout_s / 4))

    @property
    def pause_bounds_s(self) -> tuple[float, float]:
        """Shortest and longest pause between two listings: poll_max_s at most, or more for many nodes."""
        least_s = max(0.001, self.num_nodes / LISTINGS_PER_S / 10)
        return least_s, max(self.poll_max_s, self.num_nodes / LISTINGS_PER_S)

    @property
    def master_patience_s(self) -> float:
        """How long workers wait for a silent master."""
        return self.node_timeout_s if self.on_node_failure == "abort" else self.rejoin_timeout_s

    @model_validator(mode="after")
    def _weights_fit(self) -> "ClusterSettings":
        weights = self.rank_weights
        if weights is None:
            return self
        text = ",".join(f"{weight:g}" for weight in weights)
        if len(weights) != self.num_nodes:
            example = ",".join("2" if rank == 0 else "1" for rank in range(self.num_nodes))
            raise ValueError(
                f"--rank-weights {text} has {len(weights)} weights for --num-nodes {self.num_nodes}; "
                f"give one per node, e.g. {example}"
            )
        if not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"--rank-weights {text}: every weight must be a positive number")
        return self

    @model_validator(mode="after")
    def _expected_gpus_fit(self) -> "ClusterSettings":
        numbers = self.expect_gpus
        if numbers is not None and len(numbers) not in {1, self.num_nodes}:
            text = ",".join(str(number) for number in numbers)
            raise ValueError(
                f"--expect-gpus {text} has {len(numbers)} numbers for --num-nodes {self.num_nodes}; give the "
                f"total, e.g. {8 * self.num_nodes}, or one per node, e.g. {','.join(['8'] * self.num_nodes)}"
            )
        return self

    @model_validator(mode="after")
    def _place_fits(self) -> "ClusterSettings":
        if self.place:
            parse_place(self.place)
            if self.expect_gpus is not None:
                raise ValueError(
                    "--expect-gpus beside --place, which names the devices that must be there; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> "ClusterSettings":
        refuse_misfits(self.groups)
        return self

    @model_validator(mode="after")
    def _timeout_fits(self) -> "ClusterSettings":
        if self.node_timeout_s <= 2 * self.beat_s:
            raise ValueError(
                f"--node-timeout {self.node_timeout_s:g} must be more than two beats "
                f"(cluster.beat_s={self.beat_s:g})"
            )
        return self

    def weight(self, rank: int) -> float:
        """Return the weight of `rank`, 1 if no weights are set."""
        return self.rank_weights[rank] if self.rank_weights else 1.0

    def group_of(self, machine: int) -> GroupSettings | None:
        """Return the group that a machine is in, by its number in --worker; None: in none."""
        return next((group for group in self.groups.values() if machine in group.ranks), None)


class CheckpointSettings(Settings):
    """Which checkpoints are kept."""

    keep_last: Annotated[int, Field(ge=2)] = 3
    """Keep this many of the newest checkpoints; at least 2, so that one is left to fall back to."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep the checkpoint of every n-th iteration; null: none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this many with the best evaluation (without evaluations: with the best sampled reward)."""
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


SinkName = Literal["tensorboard", "wandb", "trackio"]


def _names(given: Any) -> Any:
    return [name for name in given.split(",") if name] if isinstance(given, str) else given


class MetricsSettings(Settings):
    """Where the metrics are sent, in addition to metrics.jsonl."""

    sinks: Annotated[tuple[SinkName, ...], BeforeValidator(_names)] = ()
    """tensorboard, wandb, trackio; several separated by commas."""
    project: str = "flagpost"
    """The run's project at W&B or trackio; the run is named after its log path."""


class TinySettings(Settings):
    """The built-in model."""

    warmup_steps: Annotated[int, Field(ge=0)] = 800
    """Supervised steps before RL; 0 leaves random weights."""


class RunSettings(Settings):
    """All settings of a run; the master publishes them."""

    model: str = TINY
    """Hugging Face directory or id, or builtin:tiny."""
    tasks: str = "builtin:arithmetic"
    """JSON lines of the training tasks, builtin:arithmetic, or reasoning_gym:NAME,PARAMETER=VALUE,..."""
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
    def _sft_demonstrates(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Supervised fine-tuning trains on one demonstration a task, unless the rollout says otherwise."""
        trainer, rollout = (given.get(name, {}) for name in ("trainer", "rollout"))
        if isinstance(trainer, Mapping) and trainer.get("algorithm") == "sft":  # pyright: ignore
            return {**given, "rollout": {"environment": "demonstration", "samples_per_task": 1, **rollout}}
        return given

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
    def _groups_have_advantages(self) -> "RunSettings":
        alone = self.rollout.samples_per_task < 2 and self.trainer.advantage != "one"
        if self.rl_phase == "both" and alone:
            raise ValueError(
                f"rollout.samples_per_task={self.rollout.samples_per_task}: a group of one has no "
                "advantage, so nothing would be learnt; give at least 2, or --rl-phase rollout"
            )
        return self

    @model_validator(mode="after")
    def _demonstrations_are_not_sampled(self) -> "RunSettings":
        if self.rollout.environment == "demonstration" and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g}: demonstrations are not sampled, and "
                "their likelihood is trained at temperature 1; leave it out"
            )
        likely = self.trainer.clip == "likelihood" and self.trainer.engine_correction == "off"
        if self.rollout.environment == "demonstration" and not likely:
            raise ValueError(
                f"rollout.environment=demonstration has no logprobs of an engine, which trainer.algorithm="
                f"{self.trainer.algorithm} needs (trainer.clip={self.trainer.clip}, "
                f"trainer.engine_correction={self.trainer.engine_correction}); add trainer.algorithm=sft"
            )
        return self

    @model_validator(mode="after")
    def _flat_groups_count(self) -> "RunSettings":
        if self.rollout.dynamic_sampling and self.trainer.advantage == "one":
            raise ValueError(
                f"rollout.dynamic_sampling replaces groups of equal rewards, which trainer.algorithm="
                f"{self.trainer.algorithm} learns from; leave one of them out"
            )
        if self.rollout.dynamic_sampling and self.trainer.keep_flat_groups:
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
            own = tuple(weights[machine] for machine in machines) if weights else None
            cluster = cluster.model_copy(update={"num_nodes": len(machines), "rank_weights": own})
        return self.model_copy(update={"rl_phase": half, "cluster": cluster})

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
