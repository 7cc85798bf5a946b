"""Write logprobs of a few tokens beside a checkpoint: an engine that has loaded it must compute the same."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch
from trainer.model.model import Learner

MAX_TOKENS = 64


def probe_tokens(batch: Batch) -> list[int]:
    """Return the beginning of the batch's first sequence; empty if the sequence is too short for a logprob.

    It leaves out at least the last token: an engine is asked for these tokens and one more, which must fit
    its context as the whole sequence did.
    """
    length = min(MAX_TOKENS, int(batch.lengths()[0]) - 1) if len(batch) else 0
    return batch.token_ids[:length].tolist() if length > 1 else []


def probe_logprobs(learner: Learner, token_ids: Sequence[int], dtype: torch.dtype) -> list[float]:
    """Return the logprobs of `token_ids[1:]` with the weights as they are saved, in `dtype`. Collective."""
    ids = np.array(token_ids, dtype=np.int64)
    unused = np.zeros(len(ids) - 1, dtype=np.float32)
    microbatch = Microbatch(
        token_ids=ids[None],
        position_ids=np.arange(len(ids))[None],
        scored_at=np.arange(len(ids) - 1),
        targets=ids[1:],
        sequences=np.zeros(len(ids) - 1, dtype=np.int64),
        tokens=len(ids),
        engine_logprobs=unused,
        advantages=unused,
        temperatures=np.ones(len(ids) - 1, dtype=np.float32),
    )
    with torch.no_grad(), _rounded(learner, dtype):
        logprobs, _ = learner.logprobs(microbatch)
    return logprobs.tolist()


def probe_document(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return the probe file of a checkpoint."""
    return f"{json.dumps({'token_ids': list(token_ids), 'logprobs': list(logprobs)})}\n"


@contextmanager
def _rounded(learner: Learner, dtype: torch.dtype) -> Iterator[None]:
    """Round the weights to `dtype` inside the context; host memory keeps the exact ones meanwhile.

    A sharded model on GPUs computes with bfloat16 weights in any case.
    """
    if dtype == torch.float32 or (learner.layout.sharded and learner.device.type == "cuda"):
        yield
        return
    parameters = learner.parameters.values()
    exact = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(parameter.to(dtype))
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, exact, strict=True):
            parameter.copy_(kept)
