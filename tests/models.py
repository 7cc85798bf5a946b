"""Tiny random models on disk."""

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*/=()[] .,abcdefghijklmnopqrstuvwxyz\n"
EOS = 1
CONTEXT = 256

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT2_LIKE: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}
"""Configurations of transformers, for models that are made on the spot."""


def make_model(path: Path, *, seed: int, hidden: int = 64, experts: int = 0) -> Path:
    """A random Qwen3 of 2 layers with a token for each character, with distributions far from uniform.

    Its heads are `hidden / 4` wide; vLLM's attention on a CPU wants 32 at least. `experts`: in the second
    layer.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    torch.manual_seed(seed)
    config_of: Any = Qwen3MoeConfig if experts else Qwen3Config
    model_of: Any = Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM
    moe: dict[str, Any] = {}
    if experts:
        moe = {"num_experts": experts, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
        moe["moe_intermediate_size"] = hidden
    config = config_of(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        **moe,
    )
    model_of(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def stepped(source: Path, target: Path, step: float = 1e-6) -> Path:
    """A copy of a model's or adapter's directory whose tensors are one step of training further."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        newer = {name: tensor + step * tensor.sign() for name, tensor in tensors.items()}
        save_file(newer, file, {"format": "pt"})
    return target


def write_model(
    path: Path,
    config: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    shapes: dict[str, list[tuple[int, ...]]] | None = None,
) -> Path:
    """The files of a model that nothing can compute with, made without torch; it knows one word."""
    import json

    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    if tokenizer is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    index: dict[str, str] = {}
    for name, sizes in (shapes or {"model.safetensors": [(2, 3)]}).items():
        save_file({f"{name}.{n}": np.zeros(size, np.float32) for n, size in enumerate(sizes)}, path / name)
        index |= {f"{name}.{n}": name for n in range(len(sizes))}
    if set(index.values()) != {"model.safetensors"}:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path
