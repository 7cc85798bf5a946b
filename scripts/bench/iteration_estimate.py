"""Estimate where the seconds of an iteration go on H100s, from bytes and bandwidths. Nothing is measured.

    .venv/bin/python scripts/bench/iteration_estimate.py

prints the table of docs/gpus.md.
"""

from dataclasses import dataclass

from coordinator.start.estimate import PEAKS, REACHED
from rollout.engines.kinds.vllm import fewest_gpus
from trainer.memory import HALF_BYTES

GPU_BYTES = 86e9
FLOPS, MEMORY = PEAKS["H100"]
READ = 0.7
"""The part of the memory's speed that decoding reaches."""
BUS = 25e9
"""Bytes/s between a GPU and pinned host memory, when all GPUs of a node copy: half of what PCIe 5 has."""
HASHED = 1.6e9
"""Bytes/s of SHA-256 on one thread, as measured on a CPU."""
CACHED = 2e9
"""Bytes/s that a rank writes into the page cache."""
LOADED = 5e9
"""Bytes/s that a replica, beside the others, reads from the page cache into its GPUs."""
WOKEN_S = 1.0
"""Seconds of an engine's sleep and awakening, without weights."""
STATE_BYTES = 12
"""Bytes of a trained parameter that move between GPU and host."""
TRAINED_FLOP = 8
"""Operations of a parameter and token: forward, again for the backward pass, and that."""


@dataclass(frozen=True)
class Case:
    """A model, the GPUs that it runs on, and what an iteration samples."""

    name: str
    parameters: float
    layers: int
    heads: tuple[int, int]
    head_dim: int
    nodes: int
    samples: int
    tokens: int
    gpus: int = 8
    """GPUs of a node."""


CASES = (
    Case("8B, 8 GPUs, 1024 x 2048 tokens", 8.2e9, 36, (32, 8), 128, 1, 1024, 2048),
    Case("70B, 3 x 8 GPUs, 1024 x 4096 tokens", 70.6e9, 80, (64, 8), 128, 3, 1024, 4096),
)


def seconds(case: Case) -> dict[str, float]:
    """Return the seconds of each part of an iteration."""
    ranks = case.nodes * case.gpus
    weights = HALF_BYTES * case.parameters
    size = fewest_gpus(weights, case.heads, case.gpus, GPU_BYTES)
    replicas = ranks // size
    cached = 2 * HALF_BYTES * case.layers * case.heads[1] * case.head_dim  # keys and values of a token
    held = (weights + case.samples / replicas * case.tokens / 2 * cached) / size
    return {
        "generate": case.tokens * held / (READ * MEMORY),
        "train": TRAINED_FLOP * case.parameters * case.samples * case.tokens / (REACHED * FLOPS * ranks),
        "engine sleeps and wakes": WOKEN_S,
        "trainer leaves the GPU and comes back": 2 * STATE_BYTES * case.parameters / ranks / BUS,
        "each node writes the weights to its disk": weights / case.gpus * (1 / BUS + 1 / CACHED + 1 / HASHED),
        "engine loads and verifies them": weights / LOADED,
    }


def table() -> str:
    """Return the table of docs/gpus.md."""
    columns = [seconds(case) for case in CASES]
    rows = [["estimated seconds", *(case.name for case in CASES)], ["---"] * (1 + len(CASES))]
    rows += [[name, *(f"{column[name]:.1f}" for column in columns)] for name in columns[0]]
    shares = [1 - (column["generate"] + column["train"]) / sum(column.values()) for column in columns]
    rows.append(["overhead of all this", *(f"{share:.0%}" for share in shares)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
