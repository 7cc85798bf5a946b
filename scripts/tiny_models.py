"""Tiny random models of the families that transformers has, and a batch: for the tests, and for
the page of families.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.trajectory import Group, Sample
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.model.tiny import EOS_ID, PAD_ID, make_tokenizer

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types of AutoModelForCausalLM."""
LARGEST = 15_000_000
"""Parameters of a model that still counts as tiny."""
VOCABULARY, CONTEXT, WINDOW = 104, 256, 12
WIDTHS = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, "moe_intermediate_size": 64}
"""Heads are as wide as vLLM's attention on a CPU wants them."""
SAME = {
    "hidden_size": "n_embd d_model lru_width",
    "head_dim": "dim_head attention_head_dim kv_channels global_head_dim qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim",
    "intermediate_size": "ffn_dim n_inner dff dim_ff d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "intermediate_size_mlp",
    "moe_intermediate_size": "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size kv_lora_rank q_lora_rank "
    "index_head_dim",
}
"""Other names of the widths, or numbers that may be as large."""
NUMBERS: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length",
    WINDOW: "sliding_window attention_chunk_size attention_window_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks "
    "num_key_value_heads num_global_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "moe_top_k top_k linear_num_key_heads n_mamba_heads mamba_expand",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "linear_num_heads mamba_dt_rank time_step_rank",
    8: "mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size state_size index_topk "
    "hidden_size_per_layer_input",
    16: "mamba_chunk_size chunk_size index_n_heads",
    1: "topk_group n_group num_expert_group first_k_dense_replace num_dense_layers num_shared_experts "
    "mamba_n_groups mamba_ngroups n_groups",
}
"""Small numbers, and the names in configurations that get them."""
LATENT = ("kv_lora_rank", "qk_rope_head_dim", "head_dim", "index_head_dim")
SPREAD = 0.15
"""Deviation of the weights: distributions far from uniform, in which a mistake shows."""
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
OTHER: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "num_hidden_layers": 2,
    },
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 8},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 32, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides: layers of each kind, what its configuration leaves open, and what vLLM reads
in the configurations on the Hub, which transformers does not write."""


class NotTiny(ValueError):
    """There is no tiny model of this family; the message says why."""


def tiny_config(family: str, **more: Any) -> PreTrainedConfig:
    """Return the configuration of a model of a few layers, at least one of each kind that the family has.

    `more` replaces values. Raises NotTiny, or what the family's own configuration raises.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    if default.get_text_config() is not default:
        raise NotTiny("not for text alone; its text model is a family of its own")
    named = {name: number for number, names in NUMBERS.items() for name in names.split()}
    named |= {name: WIDTHS[width] for width, names in SAME.items() for name in (width, *names.split())}
    named |= {"initializer_range": SPREAD, "init_std": SPREAD}
    own = default.to_dict()
    values: dict[str, Any] = {name: value for name, value in named.items() if own.get(name) is not None}
    values |= {"pad_token_id": PAD_ID, "bos_token_id": EOS_ID, "eos_token_id": EOS_ID}
    if own.get("kv_lora_rank"):  # latent attention has no groups of heads, and kernels of these widths alone
        values["num_key_value_heads"] = named["num_attention_heads"]
        values |= {name: own[name] for name in LATENT if own.get(name)}
        values["qk_head_dim"] = own["qk_rope_head_dim"] + named["qk_nope_head_dim"]
    values |= _layers(own) | OTHER.get(family, {}) | more
    return kind(**values)


def _layers(own: dict[str, Any]) -> dict[str, Any]:
    """Depth and lists by layer, cut to the first layers of each kind, at least two."""
    depth = next((own[name] for name in DEPTH if name in own), 0)
    lists = {
        name: value for name, value in own.items() if isinstance(value, list) and len(value) == depth > 2
    }
    kinds = {(name, value): 0 for name in lists for value in set(lists[name]) if isinstance(value, str | int)}
    kept = sorted({lists[name].index(value) for name, value in kinds})
    kept += [number for number in range(depth) if number not in kept][: max(0, 2 - len(kept))]
    cut: dict[str, Any] = {name: [value[number] for number in sorted(kept)] for name, value in lists.items()}
    return cut | {name: max(2, len(kept)) for name in DEPTH if name in own}


def make_tiny_model(family: str, directory: Path, **more: Any) -> Path:
    """Write a tiny random model of the family, with a tokenizer, as a Hugging Face directory."""
    config = tiny_config(family, **more)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise NotTiny(f"the configuration cannot be made small: {size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_batch() -> Batch:
    """Make 12 sequences of 3 prompts, most of them longer than the models' windows."""
    rng = np.random.default_rng(0)
    groups = []
    for slot in range(3):
        prompt = rng.integers(3, VOCABULARY, 16)
        samples = []
        for reward in (0.0, 1.0, 1.0, 0.5):
            ids = np.concatenate([prompt, rng.integers(3, VOCABULARY, int(rng.integers(2, 40)))])
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            engine = (mask * rng.uniform(-5, -4, len(ids))).astype(np.float32)
            samples.append(Sample(ids.astype(np.int32), mask, engine, "stop", text="", reward=reward))
        groups.append(Group(slot, f"task-{slot}", "", samples))
    return build_batch(groups, manifest_sha256="m", policy="p", temperature=1.0, seed=7)
