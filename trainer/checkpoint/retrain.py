"""Repeat training whose checkpoint has no trainer state (trainer.save_interval above 1)."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.rank_files import gather_json, rank_and_world
from trainer.checkpoint.state import CheckpointError
from trainer.documents import TrainedBatch
from trainer.model.learner import Learner
from trainer.model.parallel import local_part

TOLERANCE = 0.1
"""How far the repeated weights may end from the published ones, as a fraction of the way from the start."""

logger = logging.getLogger(__name__)


class StateBefore(NamedTuple):
    """The state from which training is repeated."""

    go_back: Callable[[], None]
    """Puts the state into the learner."""
    name: str
    remove: str
    """What to remove so that nothing is repeated."""


def train_again(
    learner: Learner,
    begin: StateBefore,
    batches: Sequence[TrainedBatch],
    repeat: Callable[[Learner, TrainedBatch], object],
    dtype: torch.dtype,
) -> None:
    """Repeat training from an earlier state, and make sure that it leads to the weights in `learner`.

    Collective. The weights in `learner` are the published ones, saved in `dtype`. If that is float32, they
    stay, and only the optimizer's state is new. If it is less precise, the learner keeps the repeated ones.
    `repeat` trains it on a batch. Raises CheckpointError if repeated and published weights are far apart.
    """
    lead = rank_and_world()[0] == 0
    published = _saved_parts(learner, dtype)
    begin.go_back()
    way, _ = _distance(learner, published, dtype)
    for batch in batches:
        if lead:
            logger.info("training again on iteration %d: its trainer state was not saved", batch.iteration)
        repeat(learner, batch)
    distance, largest = _distance(learner, published, dtype)
    text = (
        f"iterations {batches[0].iteration} to {batches[-1].iteration} were trained again from {begin.name}: "
        f"the weights lie {distance:.2e} from the published ones (a single one at most {largest:.2e}), on "
        f"a way of {way:.2e}"
    )
    rounding = torch.finfo(dtype).eps * math.sqrt(_square(learner, published)) / 100
    if distance > TOLERANCE * way + rounding:
        raise CheckpointError(
            f"{text}; that was not the same training. To go on from the published weights with a fresh "
            f"optimizer, remove {begin.remove}"
        )
    if dtype == torch.float32:
        _put_back(learner, published)
    if lead:
        logger.info("%s", text)


@torch.no_grad()
def _put_back(learner: Learner, published: Sequence[Tensor]) -> None:
    for parameter, part in zip(learner.parameters.values(), published, strict=True):
        local_part(parameter.detach()).copy_(part)


def _square(learner: Learner, parts: Sequence[Tensor]) -> float:
    """Return the squared norm of all weights, from each rank's parts; the same on all ranks."""
    every = gather_json(sum(float(part.float().square().sum()) for part in parts), "measuring the weights")
    return _over_ranks(learner, every)


def _saved_parts(learner: Learner, dtype: torch.dtype) -> list[Tensor]:
    """This rank's part of each parameter, as it is saved, in host memory."""
    parameters = learner.parameters.values()
    return [local_part(parameter.detach()).to("cpu", dtype, copy=True) for parameter in parameters]


def _distance(learner: Learner, published: Sequence[Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Return the distance of the weights, as they are saved, from `published`: Euclidean, and of the farthest
    one.

    The same on all ranks.
    """
    square, largest = 0.0, 0.0
    for repeated, served in zip(_saved_parts(learner, dtype), published, strict=True):
        if repeated.numel():
            difference = repeated.float() - served.float()
            square += float(difference.square().sum())
            largest = max(largest, float(difference.abs().max()))
    every = gather_json([square, largest], "comparing the repeated weights")
    squares = _over_ranks(learner, [square for square, _ in every])
    return math.sqrt(squares), max(largest for _, largest in every)


def _over_ranks(learner: Learner, squares: Sequence[float]) -> float:
    """Return the sum over the parts of one model, whose copies are alike."""
    layout = learner.layout
    return sum(squares) / layout.nodes if layout.sharded else max(squares)
