"""Training again what was published without its trainer state (trainer.save_interval above 1)."""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.model import Learner
from trainer.parallel import local_part
from trainer.request import TrainedBatch
from trainer.shares import gather_json, rank_and_world
from trainer.state import CheckpointError

TOLERANCE = 0.5
"""How far from the published weights the repeated ones may end, as a fraction of the way that they went."""

logger = logging.getLogger(__name__)


def train_again(
    learner: Learner,
    go_back: Callable[[], None],
    begin: str,
    batches: Sequence[TrainedBatch],
    repeat: Callable[[Learner, TrainedBatch], object],
    dtype: torch.dtype,
) -> None:
    """Repeat training from an earlier state, and make sure that it leads to the weights in `learner`.

    Collective. Those are the published ones, rounded to `dtype`; the learner keeps the repeated ones, which
    are exact. `go_back` puts the earlier state into it, which messages call `begin`; `repeat` trains it on a
    batch. Raises CheckpointError if they lie far apart.
    """
    lead = rank_and_world()[0] == 0
    published = _saved_parts(learner, dtype)
    go_back()
    way, _ = _distance(learner, published, dtype)
    for batch in batches:
        if lead:
            logger.info("training again on iteration %d: its trainer state was not saved", batch.iteration)
        repeat(learner, batch)
    apart, largest = _distance(learner, published, dtype)
    about = (
        f"iterations {batches[0].iteration} to {batches[-1].iteration} were trained again from {begin}: "
        f"the weights lie {apart:.2e} from the published ones (a single one at most {largest:.2e}), on a way "
        f"of {way:.2e}"
    )
    if apart > TOLERANCE * way:
        raise CheckpointError(
            f"{about}; that was not the same training: take back what has changed in trainer.* since, or "
            f"start with a fresh optimizer (remove {begin}; trainer.save_interval=1 if that is the model)"
        )
    if lead:
        logger.info("%s", about)


def _saved_parts(learner: Learner, dtype: torch.dtype) -> list[Tensor]:
    """What this rank holds of each parameter, as it is saved, in host memory."""
    parameters = learner.parameters.values()
    return [local_part(parameter.detach()).to("cpu", dtype, copy=True) for parameter in parameters]


def _distance(learner: Learner, published: Sequence[Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """How far the weights, as they are saved, lie from `published`: Euclidean, and the farthest single one.

    The same on all ranks.
    """
    square, largest = 0.0, 0.0
    for now, then in zip(_saved_parts(learner, dtype), published, strict=True):
        if now.numel():
            difference = now.float() - then.float()
            square += float(difference.square().sum())
            largest = max(largest, float(difference.abs().max()))
    every = gather_json([square, largest], "comparing the repeated weights")
    total = sum if learner.layout.sharded else max
    return math.sqrt(total(square for square, _ in every)), max(largest for _, largest in every)
