"""Settings of training. Importing this never imports torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollout.settings_tree import Mark, Settings
from trainer.loss_settings import LossSettings

ROUNDING_KL, NF4_KL = 0.1, 1.2
"""The largest `kl_engine` that number types explain; the other where the trainer holds the model in 4 bits:
twice what scripts/bench/learning_curves.py measures of SmolLM2-135M (0.59); larger models lose less."""


def _names(value: Any) -> Any:
    """Return a list of names, as PEFT has it, as one text."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):  # pyright: ignore
        return ",".join(value)  # pyright: ignore[reportUnknownArgumentType]
    return value.strip("[]") if isinstance(value, str) else value


class LoraSettings(Settings):
    """Low-rank adapters in place of all weights (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters, e.g. 16; 0: all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' product is scaled by alpha / rank."""
    targets: Annotated[str, BeforeValidator(_names)] = "all-linear"
    """Modules that get an adapter: all-linear (but for routers of experts), or names separated by commas,
    e.g. q_proj,v_proj."""
    base_dtype: Literal["auto", "nf4"] = "auto"
    """Number type in which the trainer holds the linear layers of the model under the adapters. auto: that of
    the computation; nf4: 4 bits, by bitsandbytes (QLoRA, arXiv 2305.14314), for models that are too large."""


class TrainerSettings(LossSettings):
    """One training phase: the batch, the loss, the optimizer, the model's layout, the processes."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the weight matrices of the layers, and AdamW for the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate. With LoRA, use about ten times as much."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Whether the learning rate stays at its peak, or falls to 0 at the end of the last of `iterations`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps over which the learning rate rises from 0, counted over the whole run."""
    global_batch_size: Annotated[int, Field(ge=1)] = 512
    """Samples per optimizer step, over all ranks."""
    passes: Annotated[int, Field(ge=1)] = 1
    """How often an iteration's samples are trained on; the ratio is to the policy before the first step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, which is added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The optimizer's weight decay; not applied to norms and biases."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm, over all ranks."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] = 8192
    """Most tokens that a rank trains at once (a longer sequence is one by itself). Lower it first if a GPU
    runs out of memory."""

    share_prompts: bool = True
    """Compute the prompt of a group once for several of its samples, where the model supports the attention
    mask for it and the mask costs less than it saves."""

    routing_replay: bool = False
    """Train each token of a mixture with the experts that the engine chose (R3)."""
    layout: Literal["auto", "replicated", "sharded", "hybrid"] = "auto"
    """Every rank holds the whole model and optimizer state (replicated), or a shard of them (sharded, FSDP2),
    or a shard of its node's (hybrid); auto: from `shard_from_parameters` on hybrid where nodes are alike and
    have room, else sharded."""
    shard_from_parameters: Annotated[float, Field(ge=0)] = 2e8
    """Smallest number of parameters at which `layout=auto` shards."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of a node that share each layer, for large models."""
    context_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs of a node that share each sequence (Ulysses), for long samples."""
    activation_checkpointing: bool = True
    """Compute layers again in the backward pass instead of keeping them, on GPUs and where the model is
    sharded."""
    compile: bool = False
    """Compile the layers with torch.compile; the first steps take longer."""
    cpu_offload: bool = False
    """Keep a sharded model and its optimizer state in host memory, if they do not fit on the GPUs; slower."""
    lora: LoraSettings = LoraSettings()
    freeze_vision: bool = True
    """Leave vision tower and projector as they are, without adapters."""
    compute_dtype: Literal["auto", "bfloat16"] = "auto"
    """Number type in which layers compute; auto: bfloat16 on a GPU, float32 on a CPU."""
    save_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number type of the weights that are served; auto: that of the layers. Logprobs are computed with
    weights that are rounded as the served ones are, or as layers compute."""
    save_interval: Annotated[int, Field(ge=1)] | None = None
    """Save the optimizer's state with every checkpoint (1), or in the background with every n-th; a restart
    then repeats the steps of up to n iterations. null: the run's first start chooses 10 for a state above 20
    GB, 2 above 1 GB, else 1."""

    processes_per_node: Annotated[int, Field(ge=0), Mark.PER_MACHINE] = 0
    """Training processes of a node; 0: one per GPU, or one on a machine without GPUs."""
    threads_per_process: Annotated[int, Field(ge=0), Mark.PER_MACHINE] = 0
    """CPU threads of a training process without a GPU; 0: the processes of a machine share its cores."""
    keep_alive: bool = True
    """Keep the training job between iterations; false: launch a new one for each."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts to train an iteration, each from the last checkpoint."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long the processes of all nodes may take to connect."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """A collective of torch.distributed that takes longer fails. Keep it below `stall_timeout_s`, else
    nothing says which one hung."""
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = 1800.0
    """Training has failed if it makes no progress for this long; a node is lost if another phase than a
    rollout makes none. Reading, hashing and writing are progress. null: never."""

    @property
    def state_interval(self) -> int:
        """`save_interval`; 1 where nobody has chosen it."""
        return self.save_interval or 1

    @property
    def shards_by_size(self) -> bool:
        """Whether a model is sharded if it is large enough. What is in 4 bits never is."""
        return self.layout == "auto" and self.lora.base_dtype == "auto"

    @property
    def sound_kl(self) -> float:
        """The largest `kl_engine` of samples of the policy itself at which nothing need be wrong."""
        return NF4_KL if self.lora.base_dtype == "nf4" else ROUNDING_KL

    def computes_in(self, on_gpu: bool) -> Literal["bfloat16", "float32"]:
        """Return the number type that the layers compute in."""
        return "bfloat16" if on_gpu or self.compute_dtype == "bfloat16" else "float32"

    def rounded_to(self, on_gpu: bool) -> Literal["bfloat16", "float32"]:
        """Return the number type of the weights that logprobs are computed with, after rounding."""
        return "bfloat16" if self.save_dtype == "bfloat16" else self.computes_in(on_gpu)

    @model_validator(mode="after")
    def _training_fits(self) -> Self:
        if self.advantage == "label" and self.global_batch_size < 2:
            raise ValueError(
                f"trainer.global_batch_size={self.global_batch_size} with trainer.advantage=label: a step "
                "compares with answers to other prompts; give at least 2"
            )
        if self.layout == "replicated" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"trainer.tensor_parallel_size={self.tensor_parallel_size} shards the model, which "
                "trainer.layout=replicated does not; leave one of them out"
            )
        if self.context_parallel > 1 and (self.tensor_parallel_size > 1 or self.compile):
            other = "compile=true" if self.compile else f"tensor_parallel_size={self.tensor_parallel_size}"
            raise ValueError(
                f"trainer.context_parallel={self.context_parallel} does not go with trainer.{other} yet; "
                "leave one of them out"
            )
        if self.layout == "replicated" and self.cpu_offload:
            raise ValueError(
                "trainer.cpu_offload=true is for a sharded model; leave it or trainer.layout=replicated out"
            )
        if not self.keep_alive and self.state_interval > 1:
            raise ValueError(
                f"trainer.save_interval={self.save_interval} with trainer.keep_alive=false would repeat the "
                "training since the last saved state in every iteration; leave one of them out"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"trainer.betas={self.betas[0]:g},{self.betas[1]:g}: each must lie in [0, 1)")
        if self.lora.base_dtype == "nf4":
            for is_given, other, advice in (
                (
                    not self.lora.rank,
                    "trainer.lora.rank=0",
                    "nothing could be trained; add trainer.lora.rank=16",
                ),
                (
                    self.layout in ("sharded", "hybrid"),
                    f"trainer.layout={self.layout}",
                    "each rank holds the whole model",
                ),
                (self.cpu_offload, "trainer.cpu_offload=true", "that is for a sharded model"),
            ):
                if is_given:
                    raise ValueError(
                        f"trainer.lora.base_dtype=nf4 with {other}: {advice}, or leave one of them out"
                    )
        if self.lora.rank and self.tensor_parallel_size > 1:
            raise ValueError(
                f"trainer.lora.rank={self.lora.rank} and trainer.tensor_parallel_size="
                f"{self.tensor_parallel_size}: adapters are not split over a layer's GPUs; give one of them"
            )
        return self
