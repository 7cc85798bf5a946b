"""Compute a prompt once for several samples: the attention mask, and whether a model obeys it.

The samples of a group share their prompt, so the work on it falls by their number. The idea is from Prefix
Grouper (arXiv 2506.05433).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch.batch import Batch, Counts
from trainer.batch.packing import Bundle, Microbatch, fill
from trainer.peers import waiting_for_peers

_TOLERANCE = 0.1
"""Allowed error, as a fraction of the difference that leaving out the mask makes: more than rounding in
bfloat16, less than a mistake."""


def attention_mask(segments: Tensor) -> Tensor:
    """(R, 1, C, C) bool from a Microbatch's `segments` (2, R, C): the tokens (last axis) that each sees."""
    own, before = segments
    seen = own[:, :, None] == own[:, None, :]
    seen |= before[:, :, None] == own[:, None, :]
    return seen.tril_()[:, None]


def pairs_per_token(config: Any, logprobs: Callable[[Microbatch], Tensor], world_size: int) -> float:
    """The `pairs_per_token` of `packing.bundle` for a model; 0 if the model does not obey the mask.

    `logprobs` returns the model's logprobs of a microbatch's trained tokens (N,). All ranks call this
    together and get the same. A layer has about 12 h^2 weights with two operations each, and spends 4 h
    operations on a pair: 24 h^2 / 4 h = 6 h.
    """
    heeds = torch.tensor(int(_heeds_mask(config, logprobs)))
    if world_size > 1:
        with waiting_for_peers("agreeing on whether prompts are shared"):
            dist.all_reduce(heeds, dist.ReduceOp.MIN)
    return 6.0 * config.hidden_size * int(heeds)


@torch.no_grad()
def _heeds_mask(config: Any, logprobs: Callable[[Microbatch], Tensor]) -> bool:
    """Whether two sequences score with a common prompt as they do alone.

    Two models are refused by their configuration: one with a sliding window, which this mask would replace
    and which is longer than the sequences tried here; and one whose attention is not torch's own.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = kinds != {"full_attention"} or getattr(config, "sliding_window", None)
    if windowed or config._attn_implementation != "sdpa":
        return False
    batch = _two_sequences(config.vocab_size)
    tokens = int(batch.input_tokens[0])
    alone = fill(batch, [[Bundle([0], tokens)], [Bundle([1], tokens)]])
    prompt = int(batch.prompt_tokens[0])
    together = fill(batch, [[Bundle([0, 1], 2 * tokens - prompt, prompt)]])
    wanted, found, without = (logprobs(m) for m in (alone, together, replace(together, segments=None)))
    return bool((found - wanted).abs().max() < _TOLERANCE * (without - wanted).abs().max())


def _two_sequences(vocabulary: int) -> Batch:
    """Two sequences of eight tokens each, of which the first four are the same."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, vocabulary, (2, 8))
    second[:4] = first[:4]
    nothing = np.zeros(2, np.float32)
    return Batch(
        token_ids=np.concatenate([first, second]).astype(np.int32),
        loss_mask=np.tile(np.repeat([0, 1], 4), 2).astype(np.uint8),
        logprobs=np.zeros(16, np.float32),
        offsets=np.array([0, 8, 16]),
        advantages=nothing,
        rewards=nothing,
        slots=np.zeros(2, np.int32),
        temperatures=np.ones(2, np.float32),
        ages=np.zeros(2, np.int32),
        counts=Counts(0, 0, 0, 0, 0, 0.0, 0.0),
        manifest_sha256="",
        policy="",
        seed=0,
    )
