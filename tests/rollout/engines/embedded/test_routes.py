"""Routes of tokens to experts: recorded by the engine, and computed with in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines.embedded.batch import Generation
from rollout.engines.embedded.cohorts import Cohorts
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.routes import routes_of
from trainer.model.token_logprobs import Scorer

EXPERTS, TAKEN, LAYERS = 8, 2, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        **{"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "first_k_dense_replace": 0},
        **{"n_group": 4, "topk_group": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
        **{"qk_nope_head_dim": 8, "v_head_dim": 16},
    },
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    given = {
        **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": TAKEN},
        **{"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    if family == "deepseek_v3":
        given |= {"num_key_value_heads": 4}
    config = AutoConfig.for_model(family, **{**given, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation("eager")
    return model.eval()


def sampled(model: Any, batch: Any) -> list[tuple[list[int], int, np.ndarray]]:
    """(tokens, tokens of its prompt, routes of all but the last) of rows that joined at two times."""
    rows = []
    generations = [
        Generation([5, 6, 7, 8, 9][:length], n, 6, 1.0, 1.0, (), 3, with_routes=True)
        for length, n in ((5, 2), (3, 1), (4, 2))
    ]
    with torch.inference_mode():
        for joining in (generations[:2], generations[2:]):
            new = [row for generation in joining for row in generation.rows]
            begin = len(batch.rows)
            draws = batch.join(new)
            for row, token, logprob in zip(batch.rows[begin:], *draws, strict=True):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
            rows += new
            for _ in range(4):
                for row, token, logprob in zip(batch.rows, *batch.step(), strict=True):
                    row.token_ids.append(token)
                    row.logprobs.append(logprob)
            batch.keep([j for j, row in enumerate(batch.rows) if row is not rows[0]])
    return [
        (
            row.generation.prompt_ids + row.token_ids,
            len(row.generation.prompt_ids),
            np.concatenate(row.routes),
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "padded") for family in FAMILIES), ("mixtral", "cohorts"), ("mixtral", "anew")],
)
def test_engine_records_the_routes_that_its_tokens_take_in_any_company(family: str, kind: str) -> None:
    model = model_of(family)
    batch = PaddedBatch(model) if kind == "padded" else Cohorts(model, cached=kind == "cohorts")
    for tokens, _, routes in sampled(model, batch):
        assert routes.shape == (len(tokens) - 1, LAYERS, TAKEN)
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokens[:-1]]))
        assert (np.sort(routes) == np.sort(routes_of(model).taken)).all()


def logprobs(scorer: Scorer, tokens: list[int], routes: np.ndarray | None) -> torch.Tensor:
    if scorer.routes is not None:
        scorer.routes.given = (
            None if routes is None else torch.from_numpy(routes.reshape(len(routes), -1))
        )
    ids = torch.tensor([tokens[:-1]])
    inputs = {"input_ids": ids, "position_ids": torch.arange(len(tokens) - 1)[None]}
    return scorer(inputs, torch.arange(len(tokens) - 1), torch.tensor(tokens[1:]))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_the_engines_routes_comes_closer_to_its_logprobs(family: str) -> None:
    engine, trained = model_of(family), model_of(family)
    samples = sampled(engine, PaddedBatch(engine))
    with torch.no_grad():
        for weight in trained.parameters():
            weight.copy_((weight * 8).bfloat16().float() / 8 * (1 + 0.02 * torch.randn_like(weight)))
    scorer, exact = (Scorer(model, torch.device("cpu")) for model in (trained, engine))
    scorer.routes, exact.routes = routes_of(trained), routes_of(engine)
    assert scorer.routes.layers == LAYERS
    own = replayed = 0.0
    with torch.no_grad():
        for tokens, _, routes in samples:
            wanted = logprobs(exact, tokens, None)
            assert (logprobs(exact, tokens, routes) - wanted).abs().max() < 1e-6
            own += float((logprobs(scorer, tokens, None) - wanted).abs().sum())
            replayed += float((logprobs(scorer, tokens, routes) - wanted).abs().sum())
    assert replayed < 0.9 * own


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_computed_again_take_the_given_routes_too(family: str) -> None:
    model, tokens = model_of(family), [5, 6, 7, 8, 9, 10]
    scorer = Scorer(model, torch.device("cpu"))
    scorer.routes = routes_of(model)
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (5, LAYERS, 1)), axis=-1)
    routes = routes[..., :TAKEN].astype(np.int16)
    gradients = []
    for again in (False, True):
        if again:
            parallel.checkpoint_layers(model)
            model.train()
        model.zero_grad()
        logprobs(scorer, tokens, routes).sum().backward()
        gradients.append([w.grad.clone() for w in model.parameters() if w.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert (logprobs(scorer, tokens, routes) - logprobs(scorer, tokens, None)).abs().max() > 1e-3
