"""A short model has a layer of each kind, or is not made."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engines.short_model import short_model
from scripts.tiny_models import tiny_config

DEEP: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": ({"layer_types": None, "num_hidden_layers": 12}, 2),
    "gpt_oss": ({"layer_types": None, "num_hidden_layers": 12}, 2),
    "gemma3_text": ({"layer_types": None, "num_hidden_layers": 14}, 6),
    "llama4_text": (
        {
            "layer_types": None,
            "num_hidden_layers": 12,
            "no_rope_layers": [1, 1, 1, 0] * 3,
            "moe_layers": [*range(12)],
        },
        4,
    ),
    "deepseek_v3": ({"num_hidden_layers": 9, "first_k_dense_replace": 3, "mlp_layer_types": None}, 4),
    "qwen3_moe": ({"num_hidden_layers": 10, "layer_types": None, "mlp_only_layers": [0, 2]}, 2),
    "qwen3_next": ({"layer_types": None, "num_hidden_layers": 12}, 4),
    "jamba": (
        {
            "num_hidden_layers": 14,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            **{"expert_layer_period": 2, "expert_layer_offset": 1},
        },
        5,
    ),
    "bamba": ({"num_hidden_layers": 9, "attn_layer_indices": [3, 7]}, 4),
    "lfm2": ({"layer_types": ["conv", "conv", "full_attention"] * 3, "num_hidden_layers": 9}, 3),
    "falcon_h1": ({"num_hidden_layers": 6}, 2),
    "minimax": ({"layer_types": ["full_attention", "linear_attention"] * 3, "num_hidden_layers": 6}, 2),
    "zamba2": ({"num_hidden_layers": 12, "layers_block_type": ["mamba", "hybrid"] + ["mamba"] * 10}, 2),
}
"""What makes a deep tiny model of a family, and how many layers at its beginning are of each kind."""


def deep_model(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **DEEP[family][0]))


def of_layers(model: Any) -> list[Any]:
    """For each layer, its modules."""
    depth = model.config.num_hidden_layers
    (stack,) = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
    return [[(name, type(part)) for name, part in layer.named_modules()] for layer in stack]


@pytest.mark.parametrize("family", DEEP)
def test_short_model_has_a_layer_of_each_kind(family: str) -> None:
    model = deep_model(family)
    short: Any = short_model(model, torch.float32)
    count = DEEP[family][1]
    assert short.config.num_hidden_layers == count and short.dtype == torch.float32
    assert model.config.num_hidden_layers > 2 * count
    layers, whole = of_layers(short), of_layers(model)
    assert layers == whole[:count] and all(layer in layers for layer in whole)
    kinds = getattr(model.config, "layer_types", None)
    assert not kinds or set(short.config.layer_types) == set(kinds)
    with torch.no_grad():
        near, far = (short(input_ids=torch.tensor([[5, k, 7, 8]])).logits[0, -1] for k in (6, 60))
    assert float((near - far).abs().max()) > 1e-3, "its context makes no difference"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param("qwen3", {"layer_types": None, "num_hidden_layers": 4}, id="half of the layers"),
        pytest.param(
            "gpt_oss",
            {"layer_types": ["sliding_attention"] * 9 + ["full_attention"], "num_hidden_layers": 10},
            id="a kind that comes late",
        ),
        pytest.param(
            "gemma3n_text",
            {
                **{"num_hidden_layers": 12, "num_kv_shared_layers": 4, "intermediate_size": 192},
                **{"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3},
                "activation_sparsity_pattern": [0.0] * 12,
            },
            id="layers that use keys and values of others, counted from the end",
        ),
    ],
)
def test_no_short_model_is_made_where_it_would_not_do(family: str, more: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **more))
    assert short_model(model, torch.float32) is None


def test_no_short_model_is_larger_than_allowed() -> None:
    model = deep_model("qwen3")
    short = short_model(model, torch.bfloat16)
    assert short is not None
    size = sum(parameter.nbytes for parameter in short.parameters())
    assert short_model(model, torch.bfloat16, most_bytes=size) is not None
    assert short_model(model, torch.bfloat16, most_bytes=size - 1) is None
    assert short_model(model, torch.float32, most_bytes=size) is None


def test_family_that_fails_with_fewer_layers_has_no_short_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_model("qwen3")

    def forward(*_: Any, **__: Any) -> None:
        raise IndexError("layer 7")

    monkeypatch.setattr(type(model.model), "forward", forward)
    assert short_model(model, torch.float32) is None


def test_short_model_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = deep_model("gpt_oss")
    before = model.config.to_dict(), torch.get_rng_state()
    assert short_model(model, torch.float32) is not None
    assert model.config.to_dict() == before[0] and torch.equal(torch.get_rng_state(), before[1])
