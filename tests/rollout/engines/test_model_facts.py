"""What the files of a model say for certain; the rest passes as unknown."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout.engines.model_facts import (
    context_tokens,
    count_active_parameters,
    count_parameters,
    may_have_chat_template,
    most_tokens,
)
from tests.models import write_model


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    model = write_model(tmp_path, shapes={"model-1.safetensors": [(3, 5)], "model-2.safetensors": [(2,), ()]})
    assert count_parameters(model) == count_active_parameters(model) == 3 * 5 + 2 + 1


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 8, "num_experts_per_tok": 2},
        {"text_config": {"num_local_experts": 8, "num_experts_per_tok": 2}},
        {"n_routed_experts": 8, "num_experts_per_tok": 2},
    ],
)
def test_of_experts_those_count_that_a_token_goes_to(tmp_path: Path, config: dict[str, Any]) -> None:
    model = write_model(tmp_path, config)
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": np.zeros((5, 2)) for n in range(8)}
    shared = {"model.layers.0.mlp.shared_experts.up_proj.weight": np.zeros((5, 2))}
    save_file({**experts, **shared}, model / "model.safetensors")
    assert (count_parameters(model), count_active_parameters(model)) == (90, 30)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default"}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, None),
        ({"max_position_embeddings": 2048, "rope_parameters": {"full": {"factor": 4}}}, None),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4}}, 128),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]},
            },
            4096,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 2048),
        ({"max_seq_len": 512}, 512),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_context_is_known_only_where_the_files_say_it(
    tmp_path: Path, config: dict[str, Any], context: int | None
) -> None:
    assert context_tokens(write_model(tmp_path, config)) == context


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "linear", "factor": None}, 512),
        ({"full": {"rope_type": "linear", "factor": 8.0}, "sliding": {"rope_type": "default"}}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
    ],
)
def test_no_scaling_gives_more_positions_than_its_factor(
    tmp_path: Path, rope: dict[str, Any], most: int
) -> None:
    config = {"max_position_embeddings": 512, "rope_scaling": rope}
    assert most_tokens(write_model(tmp_path, config)) == most


@pytest.mark.parametrize(
    ("tokenizer", "files", "expected"),
    [
        ({}, {}, False),
        ({"chat_template": None}, {}, False),
        ({"chat_template": "{{ messages }}"}, {}, True),
        ({"chat_template": [{"name": "default", "template": "x"}]}, {}, True),
        ({}, {"chat_template.jinja": "x"}, True),
        ({}, {"chat_template.json": "{}"}, True),
        ({}, {"tekken.json": "{}"}, True),
        ({"auto_map": {"AutoTokenizer": ["code.py", None]}}, {}, True),
        (None, {}, True),
    ],
)
def test_chat_template_is_missing_only_where_it_can_be_nowhere(
    tmp_path: Path, tokenizer: dict[str, Any] | None, files: dict[str, str], expected: bool
) -> None:
    model = write_model(tmp_path, tokenizer=tokenizer)
    for name, text in files.items():
        (model / name).write_text(text)
    assert may_have_chat_template(model) is expected
