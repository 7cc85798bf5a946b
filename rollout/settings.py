"""Settings of generation. Importing this never imports torch, vLLM or transformers."""

# ruff: noqa: RUF012  (pydantic gives each object a copy of a default)

import re
import urllib.parse
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.settings_tree import Mark, Settings

PROGRAMS = ("verifiers:", "gym:", "openenv:")
"""How a source begins whose tasks a program makes that is named behind it. The name of an environment that
begins so gives the rewards itself.
"""
GENERATED = ("builtin:", "reasoning_gym:", *PROGRAMS)
"""A source of tasks that begins so is not a file; it has tasks for training and for evaluation."""
TINY = "builtin:tiny"
"""The built-in model."""
SELF = "self:"
"""How a teacher begins that is the policy itself; behind it stands a field of the tasks."""
NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
"""A name that the user gives to a table of settings."""
TEMPLATE_ARGUMENTS = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
)
"""What engines themselves hand to a chat template, or to the tokenizer that applies it."""
JOIN, BESIDE = " + ", " | "
"""Join the rewards that are added up, in the setting `reward`; and that with the rewards of sources."""


def joined(value: Any) -> Any:
    """Return several rewards, each a text, as one text: it names them in all documents of a run."""
    is_several = isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value)
    return JOIN.join(value) if is_several else value


def each_joined(value: Any) -> Any:
    """Return the rewards of sources, each as one text."""
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    return {source: joined(reward) for source, reward in table.items()}


class RolloutSettings(Settings):
    """What an iteration generates, and how it is scored."""

    tasks_per_iteration: Annotated[int, Field(ge=1)] = 128
    """Tasks per iteration. Fewer make it shorter and its gradient noisier."""
    samples_per_task: Annotated[int, Field(ge=1)] = 8
    """Samples of each task, its group. Raise it if success is rare."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Maximum length of a completion, in tokens. The default is smaller if the model's context is shorter,
    and leaves one token for the prompt.
    """
    segment_tokens: Annotated[int, Field(ge=1)] | None = None
    """Partial rollouts: an iteration adds at most this many tokens to a sample, and the next continues it
    with its own policy. A group is trained on in the iteration in which its last sample ends. null: off. Only
    for environment=single_turn without `stop`."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the engine's logprobs can no longer be compared with the trainer's."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the most likely tokens; 0: all. It affects logprobs as `top_p` does."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens whose probability is below min_p x that of the most likely one. It affects logprobs as
    `top_p` does.
    """
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the end-of-sequence token."""
    tool_parser: Literal[
        "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "glm45", "openai", "gemma4", "lfm2"
    ] = "auto"
    """How tool calls are found in what the model writes. auto: as the model's chat template writes them."""
    chat_template: dict[str, Any] = {}
    """Variables for the model's chat template, e.g. rollout.chat_template.enable_thinking=false."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """A system message for each task whose `messages` have none."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tasks with more tokens, by the model's own chat template, are left out and counted; null: none."""
    reasoning_end: Annotated[str, Field(min_length=1)] | None = None
    """The text that ends a model's reasoning, e.g. </think>. The reward then gets only what follows it, and
    finds the reasoning in the task's field `reasoning`. null: the reward gets the whole text.
    """
    thinking_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of the reasoning, in tokens: longer reasoning is ended with `reasoning_end`, so that the
    rest of `max_tokens` is left for the answer. Only for environment=single_turn.
    """
    history: Literal["sampled", "template"] = "sampled"
    """What the model sees of earlier turns behind an agent's base_url. sampled: the tokens as they were
    sampled. template: what the chat template makes of the messages; if that has another beginning, a new
    sample begins."""
    concurrency: Annotated[Annotated[int, Field(ge=1)] | None, Mark.PER_GUEST] = None
    """Most samples that one node generates at the same time. null: as many as its engine can, which are
    vLLM's `max_num_seqs` for each replica, or `engine.max_batch`."""
    claims: bool | None = None
    """Nodes claim their groups while the rollout goes on, so that none waits for another; false: the groups
    are split by weight beforehand. null: true without `cluster.rank_weights`."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A group whose samples take longer than this to generate, or to score, is dropped."""
    completion_threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Once this fraction of a node's groups is finished, the rest have `grace_period_s` left. The groups of
    the other nodes count too once these have made theirs."""
    grace_period_s: Annotated[float, Field(ge=0)] = 60.0
    """A group that is not finished by then is cancelled and dropped: it is reported, and not trained on."""
    over_sample: Annotated[float, Field(ge=1)] = 1.0
    """Start this many times the groups that are needed, and keep the first to finish."""
    dynamic_sampling: bool = False
    """Replace groups whose samples all have the same reward with groups of other tasks."""
    dynamic_limit: Annotated[float, Field(ge=1)] = 3.0
    """Dynamic sampling may start at most this many times `tasks_per_iteration` groups."""
    on_reward_error: Literal["sample", "run"] = "sample"
    """What is given up when a reward function raises: the sample (it is counted, and the first traceback is
    logged), or the run.
    """
    reward_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A call of a sync reward function that takes longer is killed, and its sample is dropped."""
    reward_processes: Annotated[int, Field(ge=1)] | None = None
    """Processes per node that call sync reward functions; null: one per core, at most 8."""
    task_sampling: Literal["uniform", "ratio", "curriculum"] = "uniform"
    """Which tasks come next. uniform: all in random order before any is repeated; ratio: classes of tasks in
    fixed proportions; curriculum: prefer tasks that past policies sometimes solved.
    """
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
    """Seed of the run, from which tasks, samples and the built-in model follow."""
    reward: Annotated[str, BeforeValidator(joined)] = "exact"
    """What scores a sample: exact, numeric, regex, length, math, reasoning_gym, code, module:function,
    http://HOST:PORT/PATH, or judge:URL,model=NAME. Several are added up, each with its weight: --reward
    math=1 --reward length=-0.1, in a file ["math=1", "length=-0.1"]."""
    rewards: Annotated[dict[str, str], BeforeValidator(each_joined)] = {}
    """The reward of a source's tasks (`ratio_field`), as `reward`; others have that."""
    teacher: str | None = None
    """http://HOST:PORT/v1, a server with another model and the same tokenizer, which gives its logprobs of
    the samples' tokens (trainer.algorithm=distill). self:FIELD: the policy itself, with this field of the
    task in its prompt."""
    teachers: dict[str, str] = {}
    """Servers as `teacher`, for the tasks of a source (`ratio_field`); others have `teacher`."""
    teacher_template: str = "A hint for what follows: {hint}\n\n{prompt}"
    """The prompt (or the user's last message) that the policy has as its own teacher: {hint} is the field,
    {prompt} the task's own."""
    environment: str = "single_turn"
    """What turns a task into samples: single_turn, calculator, python, demonstration (for
    trainer.algorithm=sft), preference (for dpo), labelled (for kto), verifiers:NAME, gym:MODULE:CLASS,
    openenv:URL, or module:function."""

    @property
    def scoring(self) -> str:
        """`reward` and those of sources as one text, which names them in all documents of a run."""
        of_sources = [f"{self.ratio_field}={name}: {self.rewards[name]}" for name in sorted(self.rewards)]
        return BESIDE.join([self.reward, *of_sources])

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        """Refuse names by which `scoring` could not be taken apart."""
        for source, reward in self.rewards.items():
            if BESIDE in f"{source}{reward}" or ": " in source or not source:
                raise ValueError(
                    f"rollout.rewards.{source}: a source has no ': ' and no '{BESIDE}' in its name"
                )
            if re.search("[=|:]", self.ratio_field):
                raise ValueError(
                    f"rollout.ratio_field={self.ratio_field} with rollout.rewards.{source}: a field has no "
                    "=, | or : in its name"
                )
        return self

    @field_validator("teacher")
    @classmethod
    def _check_teacher(cls, teacher: str | None) -> str | None:
        """Refuse the policy as its own teacher without the name of a field."""
        if teacher in (SELF, SELF[:-1]):
            raise ValueError("names no field of the tasks for its hint; give self:FIELD, e.g. self:answer")
        return teacher

    @field_validator("teacher_template")
    @classmethod
    def _check_teacher_template(cls, template: str) -> str:
        """Refuse a template without a place for the prompt or for the hint."""
        for place in ("{prompt}", "{hint}"):
            if place not in template:
                raise ValueError(f"has no {place}; write it where the {place[1:-1]} of a task belongs")
        return template

    @field_validator("chat_template")
    @classmethod
    def _check_chat_template(cls, variables: dict[str, Any]) -> dict[str, Any]:
        """Refuse variables that are not the user's to set."""
        reserved = [name for name in variables if name in TEMPLATE_ARGUMENTS or not name.isidentifier()]
        if reserved:
            raise ValueError(
                f"rollout.chat_template.{reserved[0]}: is set by the engine, not by you; leave it out"
            )
        return variables


DEMONSTRATION = "demonstration"
"""The environment whose samples all have the reward 1."""
WRITTEN = (DEMONSTRATION, "preference", "labelled")
"""The environments whose samples are written in the tasks."""


class EngineSettings(Settings):
    """The server that generates."""

    kind: Literal["auto", "vllm", "torch"] = "auto"
    """What generates. auto: vLLM if it is installed and finds a GPU, else torch, the embedded engine."""
    url: Annotated[str | None, Mark.PER_MACHINE] = None
    """Base URL, without /v1, of your own vLLM server; a run never starts or stops it."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Number type of the embedded engine. float64: a sample does not depend on the rest of its batch."""
    max_batch: Annotated[int, Field(ge=1), Mark.PER_GUEST] = 256
    """Sequences that the embedded engine decodes together; lower it if memory runs out."""
    tensor_parallel_size: Annotated[Annotated[int, Field(ge=1)] | None, Mark.PER_GUEST] = None
    """GPUs of one replica of the model in vLLM; the node's other GPUs hold further replicas. null: the fewest
    that hold the weights in 0.6 of their memory."""
    deterministic: bool = False
    """Use vLLM's batch invariance, and a seed per sample, so that a sample depends neither on its batch nor
    on its node. The embedded engine always does so.
    """
    sleep: Literal[1, 2, "restart"] | None = None
    """How vLLM frees its GPU for the trainer: 1 keeps the weights in host memory, 2 drops them, restart ends
    the server. null: 1 with adapters, whose model is needed again, else 2."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest mean absolute difference between the logprobs of engine and trainer (natural logarithm) on the
    checkpoint's probe; above it the weights were loaded wrongly. null: 0.1; 0.3 where one of them computes in
    bfloat16, 1.5 with trainer.lora.base_dtype=nf4, and then only a warning if the weights are proved by
    content."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A server that has not answered after this time has failed."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum time of one request to the server."""
    health_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A server that the run started is killed and started again if it does not answer for this long
    while it generates."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a node may restart a server that died, per rollout."""
    args: Annotated[dict[str, Any], Mark.PER_GUEST] = {}
    """Further arguments of `vllm serve`, e.g. engine.args.gpu_memory_utilization=0.5."""

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
