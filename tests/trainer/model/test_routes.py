"""Routes of tokens to experts: recorded by the engine, and computed with in training."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines.completion import completion_of
from rollout.engines.embedded.batch import Generation
from rollout.engines.embedded.cohorts import Cohorts
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.protocol import routes_body
from rollout.engines.embedded.routes import routes_of
from rollout.engines.model_facts import layers_with_experts
from rollout.environments.turns import sample_of
from rollout.origin import Sampling
from rollout.part_file import decode_part, encode_part
from rollout.trajectory import Group, Sample
from tests.rollout.test_part_file import HEADER
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import plan_step
from trainer.model import parallel
from trainer.model.learner import build_learner
from trainer.model.parallel import LayoutError
from trainer.model.token_logprobs import Scorer
from trainer.settings import TrainerSettings

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
        assert (np.sort(routes) == np.sort(routes_of(model).chosen_experts)).all()


def logprobs(scorer: Scorer, tokens: list[int], routes: np.ndarray | None) -> torch.Tensor:
    if scorer.routes is not None:
        scorer.routes.replayed = None if routes is None else torch.from_numpy(routes.reshape(len(routes), -1))
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
    assert replayed < own


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
            parallel.checkpoint_layers(parallel.decoder_layers(model))
        model.zero_grad()
        logprobs(scorer, tokens, routes).sum().backward()
        gradients.append([w.grad.clone() for w in model.parameters() if w.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert (logprobs(scorer, tokens, routes) - logprobs(scorer, tokens, None)).abs().max() > 1e-3


def completion(token_ids: list[int], prompt: int, logprobs: list[float], routes: np.ndarray) -> Any:
    choice = {
        **{"prompt_token_ids": token_ids[:prompt], "token_ids": token_ids[prompt:], "text": ""},
        **{"logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"},
        "routed_experts": routes_body([routes[:prompt], routes[prompt:]]),
    }
    return completion_of(choice, Sampling(), routed_layers=range(LAYERS))


def test_token_of_a_conversation_has_the_route_of_the_turn_that_has_read_it_first() -> None:
    first, second = (np.full((tokens, LAYERS, TAKEN), tokens) for tokens in (3, 6))
    turns = completion([1, 2, 3, 4], 2, [0, 0], first), completion([*range(1, 8)], 5, [0, 0], second)
    routes = sample_of(*turns).routes
    assert routes is not None and routes[:, 0].tolist() == [3, 3, 3, 6, 6, 6, -1]
    assert sample_of(replace(turns[0], routes=None)).routes is None


def test_of_vllms_rows_of_all_layers_those_with_experts_are_taken(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4}
    names = ["lm_head.weight", *(f"model.layers.{n}.mlp.shared_experts.up_proj.weight" for n in range(4))]
    names += [f"model.layers.{n}.mlp.experts.0.up_proj.weight" for n in (1, 3, 4)]  # 4 guesses ahead
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros((1, 1), np.float32) for name in names}, tmp_path / "model.safetensors")
    assert layers_with_experts(tmp_path) == (1, 3)
    of_all = np.arange(5 * 4 * TAKEN, dtype=np.uint8).reshape(5, 4, TAKEN)
    data = io.BytesIO()
    np.save(data, of_all)
    choice = {
        **{"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5, 6], "text": "", "finish_reason": "length"},
        **{"logprobs": {"token_logprobs": [0, 0, 0]}, "routed_experts": base64.b64encode(data.getvalue())},
    }
    routes = completion_of(choice, Sampling(), routed_layers=(1, 3)).routes
    assert routes is not None and routes.tolist() == of_all[:, [1, 3]].reshape(5, -1).tolist()
    with pytest.raises(ValueError, match="no routed_experts"):
        completion_of({**choice, "routed_experts": None}, Sampling(), routed_layers=(1, 3))


def test_routes_go_from_the_engine_through_part_and_batch_into_training(tmp_path: Path) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    samples = list[Sample]()
    for length in (9, 9, 7):  # two lengths, so that rows are packed and padded
        tokens = [5, 6, 7, *rng.integers(3, 40, length).tolist()]
        routes = rng.permuted(np.tile(np.arange(EXPERTS), (len(tokens) - 1, LAYERS, 1)), axis=-1)[..., :TAKEN]
        routes[:3] = [[0, 1], [2, 3]]  # of the prompt, which is computed once
        samples.append(sample_of(completion(tokens, 3, [-1.0] * length, routes)))
    for number, sample in enumerate(samples):
        sample.reward = float(number)
    (group,) = decode_part(encode_part([Group(0, "a", "", samples)], HEADER))[1]
    stored: list[Any] = group.samples
    settings = TrainerSettings(routing_replay=True)
    about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 0}
    assert not len(build_batch([group], **about).routes)
    batch = Batch.decode(build_batch([group], settings=settings, **about).encode())
    learner = build_learner(tmp_path, torch.device("cpu"), settings)
    (microbatch,) = plan_step(batch, range(3), [1.0], 0, 64, learner.arrangement.packing)
    with torch.no_grad():
        found = learner.logprobs(microbatch)[0]
        scorer = Scorer(model, torch.device("cpu"))
        scorer.routes = routes_of(model)
        expected = [
            logprobs(scorer, stored[int(batch.rewards[k])].token_ids.tolist(),
                     stored[int(batch.rewards[k])].routes[:-1])[2:]
            for k in microbatch.members
        ]  # fmt: skip
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)


def test_samples_without_routes_and_models_without_experts_are_refused(
    group: Callable[..., Group], base_dir: Path
) -> None:
    settings = TrainerSettings(routing_replay=True)
    with pytest.raises(ValueError, match="2 of 2 samples have no routes"):
        build_batch(
            [group(0, [1.0, 0.0], np.random.default_rng(0))],
            **{"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 0, "settings": settings},
        )
    with pytest.raises(LayoutError, match="no layer with experts"):
        build_learner(base_dir, torch.device("cpu"), settings)
