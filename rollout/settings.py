"""Settings of generation. Importing this never imports torch, vLLM or transformers."""

import urllib.parse
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GENERATED = ("builtin:", "reasoning_gym:")
"""How sources of tasks begin that are no file, and have tasks for training and for evaluation."""


class Settings(BaseModel):
    """A frozen concern of the settings tree; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RolloutSettings(Settings):
    """What is generated in an iteration, and how it is scored."""

    tasks_per_iteration: Annotated[int, Field(ge=1)] = 128
    """Slots of a training iteration; each is one task and becomes one group."""
    samples_per_task: Annotated[int, Field(ge=1)] = 8
    """Samples of a group."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Longest completion, in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; below 1 the engine's logprobs are no longer comparable to the trainer's."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, beside the end-of-sequence token."""
    concurrency: Annotated[int, Field(ge=1)] = 256
    """Samples in flight on one node at most."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A group that takes longer is given up."""
    completion_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Once this fraction of a node's groups is finished, the rest have `grace_period_s` left."""
    grace_period_s: Annotated[float, Field(ge=0)] = 60.0
    """What is not finished by then is cancelled and given up: reported, and not trained on."""
    over_sample: Annotated[float, Field(ge=1)] = 1.0
    """So many times the groups that are needed are begun; the first to finish are kept."""
    dynamic_sampling: bool = False
    """Groups whose samples all have the same reward are replaced by groups of further tasks."""
    dynamic_limit: Annotated[float, Field(ge=1)] = 3.0
    """How many times `tasks_per_iteration` dynamic sampling may begin in an iteration."""
    on_reward_error: Literal["sample", "run"] = "sample"
    """What a reward function that raises costs: its sample (counted, the first traceback logged), or the
    run."""
    task_sampling: Literal["uniform", "ratio", "curriculum"] = "uniform"
    """Which tasks come next: all in a random order before any comes again; classes of tasks in fixed shares
    (`ratio`); or rather those that past policies solved sometimes but not always."""
    ratio_field: str = "source"
    """The field of a task that names its class."""
    ratio: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Share of each class, e.g. rollout.ratio.easy=1 rollout.ratio.hard=3."""
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """A node whose rollout finishes no group for so long, beside the start of its engine, is lost to the
    others; null: it may take as long as it likes."""
    part_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Finished groups are made durable at least this often."""
    seed: int = 0
    """Seed of the run: tasks, samples and the built-in model follow from it."""
    reward: str = "exact"
    """exact, numeric, regex, length, math, reasoning_gym, or module:function."""
    environment: str = "single_turn"
    """single_turn, calculator, demonstration (of trainer.algorithm=sft), or module:function."""


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
    """auto takes vLLM where it is installed and finds a GPU, else the embedded engine."""
    url: str | None = None
    """Base URL of a server that the user runs, without /v1; it is never started or stopped by us."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Of the embedded engine. float64: a sample does not depend on what else is in its batch."""
    max_batch: Annotated[int, Field(ge=1)] = 256
    """Sequences that the embedded engine decodes together."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of one replica of the model in vLLM; the node's other GPUs hold further replicas."""
    sleep: Literal[1, 2, "restart"] = 1
    """How vLLM frees its GPU while the trainer has it: 1 keeps the weights in host memory, 2 drops them,
    restart ends the server."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.1
    """How far the engine's logprobs on the checkpoint's probe may lie from the trainer's: mean absolute
    difference, natural logarithm. More is weights that were loaded wrongly."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A server that does not answer by then is a failure."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """One request to the server."""
    health_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A server of ours that does not answer for so long while it generates is killed, and started again."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a server that dies is started again within one rollout of a node."""
    args: dict[str, Any] = {}
    """Further arguments of `vllm serve`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        """Refuse what no server can be asked at."""
        if url is None:
            return None
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme == "http" and parts.hostname and (parts.port or 80)
        except ValueError:  # of the port
            fits = False
        if not fits or parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(
                f"--engine-url {url}: must look like http://127.0.0.1:8000 (http, a port, no /v1 at its end)"
            )
        return url
