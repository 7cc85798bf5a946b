"""Estimate what an iteration will need, in memory, time and disk: before it starts, from settings. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.settings.tree import RunSettings
from rollout.engines.kinds.choice import engine_kind
from rollout.settings import WRITTEN
from trainer.memory import HALF_BYTES, Shape, held_bytes, is_sharded, least_bytes, without_vision
from trainer.settings import TrainerSettings

PEAKS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.86e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "4090": (165e12, 1.0e12),
    "3090": (71e12, 0.94e12),
}
"""By a word in a GPU's name: FLOP/s in bfloat16 without sparsity, and bytes/s of its memory (data sheets)."""
MEMORIES = {
    "B200": 183_359,
    "H200": 143_771,
    "H100": 81_559,
    "A100": 81_920,
    "L40S": 46_068,
    "L4": 23_034,
    "A10": 23_028,
    "4090": 24_564,
    "3090": 24_576,
}
"""MiB of those GPUs, as nvidia-smi says them; of the A100 with the larger memory."""
REACHED = 0.4
"""The part of the peak that a training is assumed to reach."""
REACHED_BY_1B = 0.17
"""The part that it is assumed to reach on a GPU with 1e9 parameters; it grows with their square root up to
REACHED. Measured on an H200: 0.13 with 0.6e9, 0.32 with 4e9 (scripts/gpu_hour.sh)."""
CPU_GENERATES = 0.25
"""The part of its speed with large matrices at which a CPU is assumed to generate; it trains at REACHED."""
ROOM = 0.9
"""The part of a GPU's memory that `least_bytes` may be: what the allocator, NCCL and kernels take comes on
top."""
IN_FLIGHT = 256
"""Samples that a GPU is assumed to generate at the same time, where nothing says how many."""
SERVED = 18_000
"""Tokens/s that one replica of vLLM serves at most, however fast its GPUs are: its own Python takes 55 us for
each. Measured on an H100 (0.6B, CUDA graphs, 512 samples in flight)."""
LONG_S = 6 * 3600.0
"""An iteration that takes longer is said with what makes it shorter."""
RANK = 16
"""Rank of the adapters that are proposed."""

Tensors = Mapping[str, tuple[int, ...]]
"""The shapes of a model's tensors, by name."""


def memory_text(
    tensors: Tensors,
    trainer: TrainerSettings,
    count: int,
    gpu_bytes: float,
    nodes: int = 1,
    host_bytes: float = math.inf,
) -> str:
    """Return in words the memory that training needs of each of `count` GPUs, over all nodes, and what to
    lower if they have less. `host_bytes`: the memory of each node.
    """
    if count % nodes == 0 and is_whole_on_each_node(
        tensors, trainer, [count // nodes] * nodes, [gpu_bytes] * nodes, [host_bytes] * nodes
    ):
        trainer = _with(trainer, {"layout": "hybrid"})
    needed = _needed_bytes(tensors, trainer, count, nodes)
    text = f"training takes {needed / 1e9:.1f} GB or more of each GPU, which has {gpu_bytes / 1e9:.0f}"
    if needed <= ROOM * gpu_bytes:
        return text
    for less in _lower(trainer, count, is_sharded(Shape.from_tensors(tensors), trainer, count)):
        if _needed_bytes(tensors, _with(trainer, less), count, nodes) <= ROOM * gpu_bytes:
            typed = " ".join(f"trainer.{name}={str(value).lower()}" for name, value in less.items())
            return f"{text}: too little; it fits with {typed}"
    return f"{text}: too little; take more GPUs, or a smaller model"


def is_whole_on_each_node(
    tensors: Tensors,
    trainer: TrainerSettings,
    processes: Sequence[int],
    gpu_bytes: Sequence[float | None],
    host_bytes: Sequence[float],
) -> bool:
    """Return whether layout=auto is hybrid on these nodes: all have the same number of GPUs, several, and
    each has room for a shard of the whole model on its smallest GPU, and for all of the state in half of its
    own memory, where the engine's turn leaves it. Then nodes send less to each other than with one model over
    all of them: gradients once a step, and no weights for each microbatch.
    """
    sizes = [size for size in gpu_bytes if size]
    if not trainer.shards_by_size or trainer.cpu_offload or len(sizes) < max(2, len(processes)):
        return False
    shape, on_node = _shape(tensors, trainer), processes[0]
    if {*processes} != {on_node} or on_node < 2 or not is_sharded(shape, trainer, sum(processes)):
        return False
    hybrid = _with(trainer, {"layout": "hybrid"})
    has_room = least_bytes(shape, hybrid, on_node) <= ROOM * min(sizes)
    return has_room and on_node * held_bytes(shape, hybrid, on_node) <= min(host_bytes) / 2


def _needed_bytes(tensors: Tensors, trainer: TrainerSettings, count: int, nodes: int) -> float:
    sharing = max(1, count // nodes) if trainer.layout == "hybrid" else count
    return least_bytes(_shape(tensors, trainer), trainer, sharing)


def _shape(tensors: Tensors, trainer: TrainerSettings) -> Shape:
    rank = trainer.lora.rank
    text = without_vision(tensors) if trainer.freeze_vision else tensors
    adapters = rank * sum(_adapted(text, trainer.lora.targets)) if rank else 0
    return Shape.from_tensors(tensors, adapters, trainer.freeze_vision)


def _adapted(tensors: Tensors, targets: str) -> Iterator[int]:
    """Yield the sum of both widths of each matrix that gets an adapter: experts are no linear layers."""
    names = "|".join(map(re.escape, re.split(r"\s*,\s*", targets.strip())))
    pattern = re.compile(r"\.\d+\." if targets == "all-linear" else rf"\b(?:{names})\.")
    linear = {name: shape for name, shape in tensors.items() if len(shape) == 2 and ".experts." not in name}
    return (sum(shape) for name, shape in linear.items() if pattern.search(name))


def _lower(trainer: TrainerSettings, count: int, sharded: bool) -> Iterator[dict[str, Any]]:
    """Yield settings that need less memory, from the one that costs the least speed on."""
    layout = {} if sharded and trainer.layout != "hybrid" else {"layout": "sharded"}
    if layout and count > 1:
        yield layout
    split = layout if count > 1 else {}
    tokens = trainer.max_tokens_per_microbatch
    yield from ({**split, "max_tokens_per_microbatch": less} for less in (tokens // 2, tokens // 4))
    adapters = {} if trainer.lora.rank else {"lora.rank": RANK}
    if adapters:
        yield {**layout, "cpu_offload": True}
        yield adapters
    if trainer.layout not in ("sharded", "hybrid") and trainer.tensor_parallel_size == 1:
        yield {**adapters, "lora.base_dtype": "nf4"}
        yield {**adapters, "lora.base_dtype": "nf4", "max_tokens_per_microbatch": tokens // 2}


def _with(trainer: TrainerSettings, less: Mapping[str, Any]) -> TrainerSettings:
    of_lora = {name.removeprefix("lora."): value for name, value in less.items() if name.startswith("lora.")}
    return trainer.model_copy(update={**less, "lora": trainer.lora.model_copy(update=of_lora)})


def time_text(
    parameters: int, settings: RunSettings, count: int, names: Sequence[str], active: int | None = None
) -> str:
    """Return how long an iteration takes on `count` GPUs if each sample is as long as it may be; empty for
    GPUs that are not in PEAKS.

    Generation is bound by reading the weights, once for a token of each sample in flight, or by what the
    engine does for each token (with a replica on each GPU). Training computes 8 FLOP a parameter and token:
    forward, again for the backward pass, and that. `active`: the parameters that compute a token; None: all.
    """
    peaks = [peak for word, peak in PEAKS.items() for name in names if re.search(rf"\b{word}\b", name)]
    if len(peaks) < len(names) or not names:
        return ""
    rollout, samples = settings.rollout, _samples(settings)
    flops, bytes_per_s = (min(values) for values in zip(*peaks, strict=True))
    rounds = max(1.0, samples / ((rollout.concurrency or IN_FLIGHT) * count))
    rollout_s = rollout.max_tokens * rounds * HALF_BYTES * parameters / bytes_per_s
    rollout_s = max(rollout_s, samples * rollout.max_tokens / (SERVED * count))
    computing = active or parameters
    reached = min(REACHED, REACHED_BY_1B * (computing / 1e9) ** 0.5)
    return _time_text(settings, rollout_s, _train_s(computing, settings, reached * flops * count))


def cpu_time_text(active: int, settings: RunSettings, count: int, flops: float) -> str:
    """Return how long an iteration takes on `count` machines without GPUs that compute `flops` in float32, if
    each sample is as long as it may be. Generation is bound by computing with the parameters that are
    `active` for a token.
    """
    computed = 2 * active * _samples(settings) * settings.rollout.max_tokens
    rollout_s = computed / (CPU_GENERATES * flops * count)
    is_exact = engine_kind(settings.engine, 0).dtype == ("engine.dtype", "float64")
    faster = f" ({_duration(rollout_s)} with engine.dtype=float32)" if is_exact else ""
    rollout_s *= 2 if is_exact else 1
    return _time_text(settings, rollout_s, _train_s(active, settings, REACHED * flops * count), faster)


def disk_text(parameters: int, state_bytes: int, settings: RunSettings, on_gpu: bool) -> str:
    """Return in words the disk that checkpoints take, and how often the optimizer's state is in them."""
    trainer, keeps = settings.trainer, settings.checkpoints.keep_last
    saved = trainer.computes_in(on_gpu) if trainer.save_dtype == "auto" else trainer.save_dtype
    weights = (2 if saved == "bfloat16" else 4) * parameters
    every, state = (
        trainer.state_interval,
        f"{state_bytes / 1e9:.2g} GB to resume from (the optimizer's state)",
    )
    if every > 1:
        often = f"every {every} iterations {state}; {keeps} are kept"
        return f"an iteration writes {weights / 1e9:.2g} GB of weights, {often}"
    total = f"{keeps * (weights + state_bytes) / 1e9:.2g} GB"
    often = "trainer.save_interval=10 writes that every 10 iterations"
    return (
        f"an iteration writes {weights / 1e9:.2g} GB of weights, {state}; {keeps} are kept: {total}; {often}"
    )


def _samples(settings: RunSettings) -> int:
    """Return how many samples an iteration trains on."""
    rollout = settings.rollout
    if rollout.environment in WRITTEN:
        return rollout.tasks_per_iteration * (2 if rollout.environment == "preference" else 1)
    return rollout.tasks_per_iteration * rollout.samples_per_task


def _train_s(active: int, settings: RunSettings, flops: float) -> float:
    trained = settings.trainer.passes * _samples(settings)
    return 8 * active * trained * settings.rollout.max_tokens / flops


def _time_text(settings: RunSettings, rollout_s: float, train_s: float, faster: str = "") -> str:
    generates = settings.rollout.environment not in WRITTEN and settings.rl_phase == "both"
    first = f"generates for {_duration(rollout_s)}{faster} and " if generates else ""
    tokens = settings.rollout.max_tokens
    text = f"an iteration {first}trains for {_duration(train_s)} if samples have {tokens} tokens"
    lower = "rollout.tasks_per_iteration, rollout.samples_per_task or rollout.max_tokens"
    return f"{text}; lower {lower}" if rollout_s + train_s > LONG_S else text


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
