"""What the checkpoints of a run hold, and whether an engine computed what they compute."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.cluster.cluster import Cluster
from tests.engines.engines import Reference


def farthest(one: Path, other: Path) -> float:
    """The largest difference of two model directories' weights, of any of them."""
    ours, theirs = _weights(one), _weights(other)
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _weights(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    assert found, f"{directory} holds no weights"
    return found


def worst_logprob(cluster: Cluster, iteration: int, reference: Reference) -> float:
    """How far the engines' logprobs of an iteration's samples lie from transformers'."""
    worst = 0.0
    for group in cluster.groups(iteration).values():
        for sample in group.samples:
            wanted = reference.logprobs(sample.token_ids.tolist())
            pairs = zip(wanted, sample.logprobs[1:].tolist(), sample.loss_mask[1:].tolist(), strict=True)
            worst = max(worst, *(abs(a - b) for a, b, trained in pairs if trained))
    return worst
