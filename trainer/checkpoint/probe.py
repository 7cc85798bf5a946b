"""Write logprobs of a few tokens beside a checkpoint: an engine that has loaded it must compute the same."""

import json
from collections.abc import Sequence

import numpy as np
import torch

from trainer.batch.batch import Batch
from trainer.batch.packing import Microbatch
from trainer.model.learner import Learner

MAX_TOKENS = 64


def probe_tokens(batch: Batch) -> list[int]:
    """Return the beginning of the batch's first sequence; empty if the sequence is too short for a logprob.

    It leaves out at least the last token: an engine is asked for these tokens and one more, which must fit
    its context as the whole sequence did.
    """
    length = min(MAX_TOKENS, int(batch.lengths()[0]) - 1) if len(batch) else 0
    return batch.token_ids[:length].tolist() if length > 1 else []


def probe_logprobs(learner: Learner, token_ids: Sequence[int]) -> list[float]:
    """Return the logprobs of `token_ids[1:]`. Collective."""
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
    with torch.no_grad():
        logprobs, _ = learner.logprobs(microbatch)
    return logprobs.tolist()


def probe_document(learner: Learner, token_ids: Sequence[int]) -> str:
    """Return the probe file of a checkpoint. Collective."""
    document = {
        "token_ids": list(token_ids),
        "logprobs": probe_logprobs(learner, token_ids),
        "computed_in": learner.numbers,
    }
    return f"{json.dumps(document)}\n"
