"""The mask of a shared prompt, and which models it is used with."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models import GPT2_LIKE, LLAMA_LIKE
from trainer.batch import shared_prompts
from trainer.batch.packing import Microbatch
from trainer.model.token_logprobs import Scorer

EXPERTS = {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BLOOM = {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}


def scorer(name: str, model: dict[str, Any], attention: str | None = None) -> Scorer:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**model)
    kwargs = {"attn_implementation": attention} if attention else {}
    return Scorer(AutoModelForCausalLM.from_config(config, **kwargs).float(), torch.device("cpu"))


def found(scorer: Scorer, mask_as: torch.dtype = torch.bool) -> float:
    """pairs_per_token of a model."""

    def logprobs(microbatch: Microbatch) -> Tensor:
        arrays = microbatch.token_ids, microbatch.position_ids, microbatch.scored_at, microbatch.targets
        mask = None
        if microbatch.segments is not None:
            mask = shared_prompts.attention_mask(torch.from_numpy(microbatch.segments)).to(mask_as)
        return scorer(*map(torch.from_numpy, arrays), mask=mask)[0]

    return shared_prompts.pairs_per_token(scorer.config, logprobs, world_size=1)


def test_each_token_sees_its_prompt_and_its_own_sequence() -> None:
    own = torch.tensor([[0, 0, 1, 2, 2, 3]])  # a prompt of two, a sequence of one and of two, another alone
    before = torch.tensor([[0, 0, 0, 0, 0, 3]])
    mask = shared_prompts.attention_mask(torch.stack([own, before]))
    assert mask.shape == (1, 1, 6, 6)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask[0, 0]]
    assert rows == ["100000", "110000", "111000", "110100", "110110", "000001"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3Config", LLAMA_LIKE),
        ("LlamaConfig", LLAMA_LIKE),
        ("GPT2Config", GPT2_LIKE),
        ("Qwen3MoeConfig", EXPERTS),
    ],
)
def test_models_with_plain_attention_share_prompts(name: str, model: dict[str, Any]) -> None:
    assert found(scorer(name, model)) == 6 * 32


@pytest.mark.parametrize(
    ("name", "model", "attention"),
    [
        pytest.param("Qwen3Config", LLAMA_LIKE, "eager", id="a mask that is added"),
        pytest.param("MistralConfig", LLAMA_LIKE, None, id="a window in every layer"),
        pytest.param("Gemma3TextConfig", LLAMA_LIKE, None, id="a window in some layers"),
        pytest.param("Qwen3NextConfig", EXPERTS, None, id="layers without attention"),
        pytest.param("BloomConfig", BLOOM, None, id="positions in the mask"),
    ],
)
def test_other_models_do_not(name: str, model: dict[str, Any], attention: str | None) -> None:
    assert found(scorer(name, model, attention)) == 0


def test_mask_that_is_read_in_another_way_is_noticed() -> None:
    assert found(scorer("Qwen3Config", LLAMA_LIKE), mask_as=torch.float32) == 0
