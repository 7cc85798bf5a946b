"""What an engine that has loaded a checkpoint must compute: logprobs of a few tokens, written beside it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rollout.engine_admin import PROBE
from trainer.batch import Batch
from trainer.model import Learner, token_logprobs

MAX_TOKENS = 64


def probe_tokens(batch: Batch) -> list[int]:
    """The beginning of the batch's first sequence; empty if there is no logprob in it.

    One token less than all of it at most: an engine is asked for these and one more, which must fit its
    context as the whole did.
    """
    length = min(MAX_TOKENS, int(batch.lengths()[0]) - 1) if len(batch) else 0
    return batch.token_ids[:length].tolist() if length > 1 else []


def write_probe(learner: Learner, token_ids: Sequence[int], dtype: torch.dtype, directory: Path) -> None:
    """Write the logprobs of `token_ids[1:]` under the weights as they are saved, in `dtype`."""
    ids = torch.tensor(token_ids, device=learner.device)
    at = torch.arange(len(token_ids), device=learner.device)
    with torch.no_grad(), _rounded(learner, dtype):
        logprobs, _ = token_logprobs(learner.model, ids[None], at[None], at[:-1], ids[1:], temperature=1.0)
    about = {"token_ids": list(token_ids), "logprobs": logprobs.tolist()}
    (directory / PROBE).write_text(json.dumps(about) + "\n")


@contextmanager
def _rounded(learner: Learner, dtype: torch.dtype) -> Iterator[None]:
    """The weights as `dtype` holds them. The exact ones wait where the gradients are: they cost no memory,
    and every step zeroes them first.
    """
    if dtype == torch.float32:
        yield
        return
    kept = learner.gradients.split([parameter.numel() for parameter in learner.parameters.values()])
    pairs = [(p, flat.view_as(p)) for p, flat in zip(learner.parameters.values(), kept, strict=True)]
    for parameter, exact in pairs:
        exact.copy_(parameter)
        parameter.copy_(exact.to(dtype))
    try:
        yield
    finally:
        for parameter, exact in pairs:
            parameter.copy_(exact)
