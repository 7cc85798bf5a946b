"""Settings of training. Importing this never imports torch."""

from typing import Annotated, Literal

from pydantic import Field

from rollout.settings import Settings


class TrainerSettings(Settings):
    """One training phase: the batch, the loss, the optimizer, the processes."""

    algorithm: Literal["default"] = "default"
    """A preset of the loss; `default`: A = r - mean, clipped, token mean, KL off, truncated correction."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak of AdamW's learning rate; constant after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps over which the learning rate rises from 0, counted over the whole run."""
    global_batch_size: Annotated[int, Field(ge=1)] = 512
    """Sequences of one optimizer step, over all ranks."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Not applied to norms and biases."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm after the reduction."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476)."""
    engine_correction_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncated importance sampling of pi_old / mu_engine: the weight's upper bound."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] = 8192
    """Sequences are packed into microbatches of at most this many tokens (a longer sequence is one alone)."""
    processes_per_node: Annotated[int, Field(ge=0)] = 0
    """Training processes of a node; 0: one per GPU, one on a machine without."""
    threads_per_process: Annotated[int, Field(ge=0)] = 0
    """CPU threads of a training process without a GPU; 0: the machine's cores shared among its processes."""
    keep_alive: bool = True
    """Keep the training job between iterations; false: launch it anew for each."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """How often training of an iteration is tried, each time anew from the last checkpoint."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """The processes of all nodes must have met by then."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Of torch.distributed: a collective that takes longer fails."""
    stall_timeout_s: Annotated[float, Field(gt=0)] | None = 1800.0
    """Training has failed if its progress stands still for so long, and a node that is in any other row but a
    rollout for so long is lost (the longest one reads a checkpoint to verify it); null: never."""
