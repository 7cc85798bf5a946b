"""Settings of generation. Importing this never imports torch, vLLM or transformers."""

import urllib.parse
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GENERATED = ("builtin:", "reasoning_gym:")
"""A source of tasks that begins so is not a file; it has tasks for training and for evaluation."""


class Settings(BaseModel):
    """One part of the settings tree, frozen; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RolloutSettings(Settings):
    """What is generated in an iteration, and how it is scored."""

    tasks_per_iteration: Annotated[int, Field(ge=1)] = 128
    """Slots of a training iteration; each slot holds one task, which becomes one group."""
    samples_per_task: Annotated[int, Field(ge=1)] = 8
    """Samples of a group."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Longest completion, in tokens. The default is less where the model's context is shorter: one token
    of it is left for a prompt."""
    segment_tokens: Annotated[int, Field(ge=1)] | None = None
    """An iteration adds at most so many tokens to a sample. The next iteration goes on with what is
    unfinished then, by its own policy. A group is trained in the iteration in which its last sample ends.
    null: a sample is made in one iteration. Only for environment=single_turn without `stop`."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the engine's logprobs can no longer be compared with the trainer's."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the end-of-sequence token."""
    concurrency: Annotated[int, Field(ge=1)] = 256
    """Most samples that one node generates at the same time."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A group that takes longer is given up."""
    completion_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Once this fraction of a node's groups is finished, the rest have `grace_period_s` left."""
    grace_period_s: Annotated[float, Field(ge=0)] = 60.0
    """A group that is not finished by then is cancelled and given up: reported, and not trained on."""
    over_sample: Annotated[float, Field(ge=1)] = 1.0
    """Begin this many times the groups that are needed, and keep the first to finish."""
    dynamic_sampling: bool = False
    """Replace groups whose samples all have the same reward by groups of further tasks."""
    dynamic_limit: Annotated[float, Field(ge=1)] = 3.0
    """How many times `tasks_per_iteration` dynamic sampling may begin in an iteration."""
    on_reward_error: Literal["sample", "run"] = "sample"
    """What ends when a reward function raises: the sample (counted, the first traceback logged), or the
    run."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A sync reward function that takes longer for a completion is ended, and the sample is lost."""
    reward_processes: Annotated[int, Field(ge=1)] | None = None
    """Processes of a node that call a sync reward function; null: one a core, 8 at most."""
    task_sampling: Literal["uniform", "ratio", "curriculum"] = "uniform"
    """Which tasks come next. uniform: all in a random order before any comes again; ratio: classes of tasks
    in fixed shares; curriculum: rather tasks that past policies solved sometimes but not always."""
    ratio_field: str = "source"
    """The field of a task that names its class."""
    ratio: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Share of each class, e.g. rollout.ratio.easy=1 rollout.ratio.hard=3."""
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """A node is lost when its rollout has finished or given up no group for this long, the start of its
    engine not counted; null: `group_timeout_s`."""
    part_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Finished groups are made durable at least this often."""
    seed: int = 0
    """Seed of the run; it decides the tasks, the samples and the built-in model."""
    reward: str = "exact"
    """exact, numeric, regex, length, math, reasoning_gym, or module:function."""
    environment: str = "single_turn"
    """single_turn, calculator, demonstration (for trainer.algorithm=sft), or module:function."""


class EvalSettings(Settings):
    """When and how the policy is evaluated, on tasks of its own."""

    interval: Annotated[int, Field(ge=0)] = 10
    """Evaluate in iteration 1 and every `interval` iterations after it; 0: never."""
    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Samples of an evaluation task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    success: float = 1.0
    """A sample with this reward or more has solved its task; pass@k counts these."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest completion of an evaluation; null: as in training."""
    max_tasks: Annotated[int, Field(ge=1)] = 512
    """Evaluate on the first `max_tasks` tasks at most."""


class EngineSettings(Settings):
    """The server that generates."""

    kind: Literal["auto", "vllm", "torch"] = "auto"
    """auto: vLLM where it is installed and finds a GPU, else torch, the embedded engine."""
    url: str | None = None
    """Base URL, without /v1, of a server that the user runs; a run never starts or stops it."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Number type of the embedded engine. float64: a sample does not depend on the rest of its batch."""
    max_batch: Annotated[int, Field(ge=1)] = 256
    """Sequences that the embedded engine decodes together."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of one replica of the model in vLLM; the node's other GPUs hold further replicas."""
    sleep: Literal[1, 2, "restart"] = 1
    """How vLLM frees its GPU for the trainer: 1 keeps the weights in host memory, 2 drops them, restart ends
    the server."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean absolute difference between the logprobs of engine and trainer (natural logarithm) on the
    checkpoint's probe. If it is larger, the weights were loaded wrongly."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A server that has not answered by then has failed."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time that one request to the server may take."""
    health_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A server that the run started is killed and started again if it does not answer for this long
    while it generates."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a node starts a server that died again within one rollout."""
    args: dict[str, Any] = {}
    """Further arguments of `vllm serve`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        """Refuse a URL at which no server can be asked."""
        if url is None:
            return None
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme == "http" and parts.hostname and (parts.port or 80)
        except ValueError:  # of the port
            fits = False
        if "@" in url:
            raise ValueError("--engine-url: leave user and password out of the URL, which is published")
        if not fits or parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(
                f"--engine-url {url}: must look like http://127.0.0.1:8000 (http, a port, no /v1 at its end)"
            )
        return url
