"""The embedded engine serves families of every kind: what each row draws is what the model gives it alone."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollout.engines.embedded import batch_choice
from rollout.engines.embedded.batch import Batch, Generation, SampleInProgress
from rollout.engines.embedded.batch_choice import batch_maker
from rollout.engines.embedded.cohorts import Cohorts
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.weights import load_model
from tests.adapters import make_adapter

WAIT_S = 60
WINDOW = 6
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA: dict[str, Any] = {"n_groups": 1, "chunk_size": 8}
FAMILIES: dict[str, tuple[dict[str, Any], str, float]] = {
    "gemma3_text": (
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
        "padded",
        1e-9,
    ),
    "gpt_oss": ({"sliding_window": WINDOW, "num_local_experts": 4, **EXPERTS}, "padded", 1e-9),
    "qwen3_moe": ({"num_experts": 4, **EXPERTS}, "padded", 1e-9),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "cohorts", 1e-9),
    "mamba2": (
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "expand": 2, **MAMBA},
        "cohorts",
        1e-4,  # it computes its recurrence in float32, plainly another way than step by step
    ),
    "nemotron_h": (
        {
            "layers_block_type": ["linear_attention", "full_attention"] * 2,
            **{"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, **MAMBA},
            "time_step_min": 2e-4,
        },
        "uncached",  # with the cache it does not bound the time step from below, as without
        1e-4,
    ),
    "recurrent_gemma": (
        {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
        "uncached",  # its cache is in its modules
        1e-9,
    ),
}
"""What makes a tiny model of the family, how its rows are decoded, and how exact it is in float64."""


def make_family(path: Path, name: str, model_dir: Path, seed: int = 0) -> Path:
    """A random model of the family, with the tokenizer of `model_dir`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**COMMON, **FAMILIES[name][0]})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, EmbeddedEngine]:
    """Its name, a model of it, and an engine that has one."""
    torch.set_num_threads(1)
    directory = make_family(tmp_path_factory.mktemp(request.param), request.param, model_dir)
    return request.param, directory, started(directory)


def started(directory: Path, max_batch: int = 64) -> EmbeddedEngine:
    engine = EmbeddedEngine(directory, dtype=torch.float64, max_batch=max_batch)
    engine.start()
    return engine


def generation(length: int, *, n: int = 2, max_tokens: int = 24, seed: int = 0) -> Generation:
    prompt = [3 + (11 * i * i + length) % 90 for i in range(length)]
    return Generation(prompt, n, max_tokens, 1.0, 1.0, (), seed)


def rows_of(future: "Future[list[SampleInProgress]]") -> list[SampleInProgress]:
    return future.result(timeout=WAIT_S)


def tokens_of(future: "Future[list[SampleInProgress]]") -> list[list[int]]:
    return [row.token_ids for row in rows_of(future)]


def error_of(model: torch.nn.Module, row: SampleInProgress) -> float:
    """The largest difference to a plain forward pass over the whole row, alone."""
    prompt = row.generation.prompt_ids
    ids = torch.tensor([prompt + row.token_ids])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1).gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
    return float((torch.tensor(row.logprobs, dtype=torch.float64) - logprobs).abs().max())


def kind_of(batch: Batch) -> str:
    if isinstance(batch, PaddedBatch):
        return "padded"
    assert isinstance(batch, Cohorts)
    return "cohorts" if batch.is_cached else "uncached"


def test_row_gets_the_logprobs_that_the_model_gives_it_alone(
    family: tuple[str, Path, EmbeddedEngine],
) -> None:
    name, directory, engine = family
    _, kind, precision = FAMILIES[name]
    # Prompts shorter and longer than the window; rows leave at different times, and 8 wait for a place.
    requests = [generation(length, n=9, seed=length, max_tokens=30 - length) for length in (1, 4, 4, 17)]
    rows = [row for future in map(engine.submit, requests) for row in rows_of(future)]
    assert max(len(row.generation.prompt_ids + row.token_ids) for row in rows) > 3 * WINDOW
    model = load_model(directory, torch.float64)
    assert max(error_of(model, row) for row in rows) < precision
    assert kind_of(engine._batch) == kind
    prompt = generation(17).prompt_ids
    row = SampleInProgress(Generation(prompt[:1], 1, 16, 1.0, 1.0, (), 0), 0, token_ids=prompt[1:])
    row.logprobs = engine.prompt_logprobs(prompt).result(WAIT_S)
    assert error_of(model, row) < precision


def test_tokens_are_the_same_alone_and_in_company_of_any_size(
    family: tuple[str, Path, EmbeddedEngine],
) -> None:
    _, directory, large = family
    small = started(directory, max_batch=3)
    watched = [generation(length, n=3, seed=100 * length) for length in (2, 2, 9)]
    alone = [tokens_of(large.submit(generation(len(w.prompt_ids), n=3, seed=w.seed))) for w in watched]
    company = [large.submit(generation(1 + i % 5, seed=i, max_tokens=1 + i)) for i in range(12)]
    assert [tokens_of(f) for f in [large.submit(w) for w in watched]] == alone
    again = [generation(len(w.prompt_ids), n=3, seed=w.seed) for w in watched]
    assert [tokens_of(f) for f in [small.submit(w) for w in again]] == alone
    for future in company:
        rows_of(future)


def test_rows_of_a_hybrid_are_aborted_withdrawn_and_continued_after_new_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    first, second = (make_family(tmp_path / str(seed), "lfm2", model_dir, seed) for seed in (0, 1))
    engine = started(first)
    before = tokens_of(engine.submit(generation(5)))
    endless, withdrawn = generation(4, n=20, max_tokens=200), generation(4, n=20, max_tokens=200)
    future = engine.submit(endless)
    engine.submit(withdrawn).cancel()
    engine.pause("abort").result(WAIT_S)
    assert {row.finish_reason for row in rows_of(future)} <= {"abort", "stop"}
    engine.reload(second).result(WAIT_S)
    engine.resume().result(WAIT_S)
    changed = tokens_of(engine.submit(generation(5)))
    assert changed != before and changed == tokens_of(started(second).submit(generation(5)))
    engine.load_adapter(make_adapter(tmp_path / "adapter", second, seed=0, targets="q_proj")).result(WAIT_S)
    assert tokens_of(engine.submit(generation(5))) != changed
    engine.reload(first).result(WAIT_S)
    assert tokens_of(engine.submit(generation(5))) == before


@pytest.mark.parametrize(
    ("name", "more", "whole"),
    [
        ("gemma3_text", {}, False),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 4}, False),
        ("mamba2", {}, False),
        ("recurrent_gemma", {}, True),  # nothing is believed that is as slow as this
    ],
)
def test_first_layers_of_a_deep_model_tell_how_all_are_decoded(
    name: str, more: dict[str, Any], whole: bool
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **FAMILIES[name][0], "num_hidden_layers": 8, **more})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    maker = batch_maker(model)
    assert bool(calls) == whole
    assert kind_of(maker(model)) == FAMILIES[name][1]


def test_window_longer_than_what_is_tried_counts_too(model_dir: Path, tmp_path: Path) -> None:
    """A model whose padded rows go wrong only beyond its window of 100 tokens."""
    directory = make_family(tmp_path / "model", "gemma3_text", model_dir)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "sliding_window": 100}))
    model: Any = load_model(directory, torch.float64)
    assert kind_of(batch_maker(model)(model)) == "padded"
    assert model.config.sliding_window == 100
    plain = model.forward

    def forgets_its_window(**given: Any) -> Any:
        if given.get("attention_mask") is None:
            return plain(**given)
        window, model.config.sliding_window = model.config.sliding_window, 10**6
        try:
            return plain(**given)
        finally:
            model.config.sliding_window = window

    model.forward = forgets_its_window
    assert kind_of(batch_maker(model)(model)) == "cohorts"


@pytest.mark.parametrize(
    ("broken", "kind"),
    [(("attention_mask",), "cohorts"), (("attention_mask", "past_key_values"), "uncached")],
)
def test_family_that_ignores_the_mask_or_its_cache_is_found_out(
    model_dir: Path, broken: tuple[str, ...], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = load_model(model_dir, torch.float64)
    plain = model.forward

    def forward(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        logits_to_keep: int = 0,
    ) -> Any:
        given = {"attention_mask": attention_mask, "past_key_values": past_key_values}
        return plain(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{name: value for name, value in given.items() if name not in broken},
        )

    model.forward = forward
    with caplog.at_level("INFO", logger=batch_choice.__name__):
        assert kind_of(batch_maker(model)(model)) == kind
    assert len(caplog.records) == 1
