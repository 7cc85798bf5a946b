"""Models and sequences for the benchmark of the training step."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trainer.batch.batch import Batch

_QWEN3 = {
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "hidden_size": 2560,
        "intermediate_size": 9728,
    },
}
"""Shapes of Qwen3 with tied embeddings."""
SHORTEST, LONGEST = 16, 1024
LEAST_PROMPT_TOKENS = 8
"""Prompts are equally long, so TRL need not pad them."""


def draw_lengths(kind: str, options: argparse.Namespace) -> NDArray[np.int64]:
    """Draw (sequences,) numbers of tokens, the shortest and the longest among them."""
    random = np.random.default_rng(0)
    longest, sequences = options.longest, options.sequences
    if kind == "uniform":
        lengths = random.integers(SHORTEST, longest + 1, sequences)
    else:
        lengths = np.exp(random.uniform(np.log(SHORTEST), np.log(longest), sequences)).astype(np.int64)
    lengths[:2] = SHORTEST, longest
    return lengths + options.prompt_tokens - LEAST_PROMPT_TOKENS


def draw_sequences(options: argparse.Namespace) -> tuple[list[NDArray[np.int32]], NDArray[np.float32]]:
    """Make token ids of each sequence, and an advantage for each, (sequences,)."""
    random = np.random.default_rng(1)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    token_ids = [random.integers(3, vocab_size, length, dtype=np.int32) for length in options.tokens]
    for k, ids in enumerate(token_ids):
        ids[: options.prompt_tokens] = token_ids[k - k % options.samples][: options.prompt_tokens]
    return token_ids, random.choice(np.array([-0.5, 0.5], np.float32), len(token_ids))


def make_batch(
    shape: str, token_ids: list[NDArray[np.int32]], advantages: NDArray[np.float32], prompt_tokens: int
) -> "Batch":
    """Return the batch of these sequences, as if an engine had found all tokens equally likely."""
    from trainer.batch.batch import Batch, Counts

    count, lengths = len(token_ids), [len(ids) for ids in token_ids]
    trained = np.concatenate([np.arange(length) >= prompt_tokens for length in lengths])
    return Batch(
        token_ids=np.concatenate(token_ids),
        loss_mask=trained.astype(np.uint8),
        logprobs=np.where(trained, -np.log(SHAPES[shape]["vocab_size"]), 0).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        advantages=advantages,
        rewards=np.zeros(count, np.float32),
        slots=np.arange(count, dtype=np.int32),
        temperatures=np.ones(count, np.float32),
        ages=np.zeros(len(trained), np.int32),
        counts=Counts(count, count, count, count, 0, 0.0, 0.0),
        manifest_sha256="",
        policy="",
        seed=0,
    )


def make_model(shape: str, directory: Path, device: str = "cpu") -> Path:
    """Write a model directory of the shape, with random weights; those of a GPU are in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.model import tiny

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=2 * LONGEST, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    (model.bfloat16() if device == "cuda" else model).save_pretrained(directory)
    tiny.make_tokenizer().save_pretrained(directory)
    return directory


def parameters(shape: str) -> int:
    """Count the parameters of the matrices; the tied embedding counts once, as the head."""
    of = SHAPES[shape]
    heads = 2 * of["num_attention_heads"] + 2 * of["num_key_value_heads"]
    layer = of["hidden_size"] * (heads * of["head_dim"] + 3 * of["intermediate_size"])
    return of["num_hidden_layers"] * layer + of["vocab_size"] * of["hidden_size"]


def flops_of(shape: str, lengths: NDArray[np.int64]) -> float:
    """Count forward and backward: 6 per parameter and token; causal attention 6 x width x length per
    token."""
    of = SHAPES[shape]
    width = of["num_hidden_layers"] * of["num_attention_heads"] * of["head_dim"]
    return 6.0 * parameters(shape) * float(lengths.sum()) + 6.0 * width * float((lengths**2).sum())
