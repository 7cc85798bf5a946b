"""Settings of generation. Importing this never imports torch, vLLM or transformers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """A node whose rollout finishes no group for so long, beside the start of its engine, is lost to the
    others; null: it may take as long as it likes."""
    part_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Finished groups are made durable at least this often."""
    seed: int = 0
    """Seed of the run: tasks, samples and the built-in model follow from it."""
    reward: str = "exact"
    """exact, numeric, regex, length, or module:function."""
    environment: str = "single_turn"
    """single_turn, or module:function."""


class EvalSettings(Settings):
    """When and how the policy is evaluated, on tasks of its own."""

    interval: Annotated[int, Field(ge=0)] = 10
    """Evaluate in iteration 1 and every `interval` iterations after it; 0: never."""
    samples_per_task: Annotated[int, Field(ge=1)] = 1
    """Samples of an evaluation task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    max_tasks: Annotated[int, Field(ge=1)] = 512
    """Evaluate on the first `max_tasks` tasks at most."""


class EngineSettings(Settings):
    """The server that generates."""

    kind: Literal["auto", "vllm", "torch"] = "auto"
    """auto takes vLLM where it is installed and finds a GPU, else the embedded engine."""
    url: str | None = None
    """Base URL of a server that the user runs; it is never started or stopped by us."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Of the embedded engine. float64: a sample does not depend on what else is in its batch."""
    max_batch: Annotated[int, Field(ge=1)] = 256
    """Sequences that the embedded engine decodes together."""
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
