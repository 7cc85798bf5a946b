"""Numerics of the embedded engine: what is drawn, with which log-probability, alone and in any company."""

import math
import random
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rollout.counter_rng import uniforms
from rollout.engines.embedded import engine as engine_module
from rollout.engines.embedded.batch import Generation, SampleInProgress, draw_tokens
from rollout.engines.embedded.endings import completed_stop_string, in_front
from rollout.engines.embedded.engine import EmbeddedEngine, EngineStopped
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.weights import load_model
from tests.models import EOS
from tests.rollout.engines.test_appended_text import metaspace

WAIT_S = 60


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> EmbeddedEngine:
    torch.set_num_threads(1)
    engine = EmbeddedEngine(model_dir, dtype=torch.float64, max_batch=256)
    engine.start()
    return engine


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> torch.nn.Module:
    """The same weights in the dtype that the trainer uses."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def generation(
    prompt: list[int],
    *,
    n: int = 1,
    max_tokens: int = 12,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
) -> Generation:
    return Generation(prompt, n, max_tokens, temperature, top_p, stop, seed)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{length}/{seed}/{i}").randrange(3, 40) for i in range(length)]


def rows_of(future: "Future[list[SampleInProgress]]") -> list[SampleInProgress]:
    return future.result(timeout=WAIT_S)


def tokens_of(future: "Future[list[SampleInProgress]]") -> list[list[int]]:
    return [row.token_ids for row in rows_of(future)]


def drawn(
    logits: torch.Tensor, u: torch.Tensor, **settings: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is drawn with these settings of each row; the others leave the distribution as it is."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    rows = {name: settings.get(name, [value] * len(u)) for name, value in neutral.items()}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}
    return draw_tokens(logits, u=u, **{**tensors, "top_k": tensors["top_k"].long()})


def reference_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """(T, V): at each generated position, from one plain forward pass over the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_tokens_and_logprobs_agree_with_a_plain_forward(
    engine: EmbeddedEngine, reference: torch.nn.Module, temperature: float
) -> None:
    futures = [
        engine.submit(generation(prompt_of(length), n=3, seed=7, max_tokens=20, temperature=temperature))
        for length in (1, 2, 5, 11, 40)
    ]
    for future in futures:
        for row in rows_of(future):
            prompt = row.generation.prompt_ids
            logprobs = reference_logprobs(reference, prompt, row.token_ids)
            scaled = (logprobs / (temperature or 1.0)).log_softmax(-1)
            expected = scaled[torch.arange(len(row.token_ids)), row.token_ids]
            assert np.allclose(row.logprobs, expected.numpy(), atol=1e-4)
            if temperature == 0:
                assert row.token_ids == logprobs.argmax(-1).tolist()
            else:
                u = torch.from_numpy(
                    uniforms(
                        np.array([7 + row.index], np.uint64), np.arange(len(row.token_ids), dtype=np.uint64)
                    )
                )
                assert row.token_ids == [
                    int(torch.searchsorted(p.exp().cumsum(0), x)) for p, x in zip(scaled, u, strict=True)
                ]


def test_logprobs_agree_with_a_forward_in_float64_to_its_precision(
    engine: EmbeddedEngine, model_dir: Path
) -> None:
    model = load_model(model_dir, torch.float64)
    (row,) = rows_of(engine.submit(generation(prompt_of(9), max_tokens=30, seed=3)))
    expected = reference_logprobs(model, prompt_of(9), row.token_ids)[
        torch.arange(len(row.token_ids)), row.token_ids
    ]
    assert np.allclose(row.logprobs, expected.numpy(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("others", [1, 50, 255])
def test_tokens_are_the_same_in_any_company(engine: EmbeddedEngine, others: int) -> None:
    watched = [(prompt_of(length, 1), 100 + length) for length in (1, 3, 17)]
    alone = [rows_of(engine.submit(generation(p, seed=s, max_tokens=24))) for p, s in watched]
    company = [generation(prompt_of(1 + i % 37, 2), seed=i, max_tokens=1 + i % 30) for i in range(others)]
    half = len(company) // 2
    for other in company[:half]:
        engine.submit(other)
    together = [rows_of(f) for f in [engine.submit(generation(p, seed=s, max_tokens=24)) for p, s in watched]]
    for one, two in zip(alone, together, strict=True):
        assert one[0].token_ids == two[0].token_ids
        assert np.allclose(one[0].logprobs, two[0].logprobs, rtol=0, atol=1e-9)
    for other in company[:half]:
        rows_of(other.future)


def test_row_that_joins_midway_draws_what_it_draws_alone(model_dir: Path) -> None:
    """Without the engine's thread, so that the moment of joining is known."""
    model = load_model(model_dir, torch.float64)

    def run(joins_at: dict[int, Generation], steps: int) -> None:
        batch = PaddedBatch(model)

        def take(begin: int, tokens: list[int], logprobs: list[float]) -> None:
            for row, token, logprob in zip(batch.rows[begin:], tokens, logprobs, strict=True):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
            going_on = [
                i for i, row in enumerate(batch.rows) if len(row.token_ids) < row.generation.max_tokens
            ]
            if len(going_on) < len(batch.rows):
                batch.keep(going_on)

        with torch.inference_mode():
            for step in range(steps):
                if step in joins_at:
                    begin = len(batch.rows)
                    take(begin, *batch.join(joins_at[step].rows))
                if batch.rows:
                    take(0, *batch.step())

    def late() -> Generation:
        return generation(prompt_of(6), n=2, seed=5, max_tokens=15)

    alone, in_company = late(), late()
    run({0: alone}, 15)
    long_prompt, short = generation(prompt_of(50), seed=1, max_tokens=9), generation(prompt_of(2), seed=2)
    run({0: long_prompt, 3: short, 5: in_company}, 25)
    assert [row.token_ids for row in in_company.rows] == [row.token_ids for row in alone.rows]
    assert len(alone.rows[0].token_ids) == 15


def test_prompt_that_is_only_scored_does_not_wait_for_company(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIET_S", "GATHER_S"):
        monkeypatch.setattr(engine_module, name, 2.0 * WAIT_S)
    assert len(rows_of(engine.submit(generation(prompt_of(5), max_tokens=1)))) == 1


def test_nobody_waits_for_a_prompt_that_the_model_fails_on(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    engine = EmbeddedEngine(model_dir, dtype=torch.float64, max_batch=64)
    monkeypatch.setattr(PaddedBatch, "_prefill", fail)
    futures = [engine.submit(generation(prompt_of(length), n=3)) for length in (2, 5)]
    engine.start()
    for future in futures:
        with pytest.raises(EngineStopped, match="no such kernel"):
            future.result(timeout=WAIT_S)
    assert not engine.healthy


def test_nobody_waits_for_a_sequence_that_the_model_fails_to_score(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(PaddedBatch, "prompt_logprobs", fail)
    engine = EmbeddedEngine(model_dir, dtype=torch.float64, max_batch=64)
    engine.start()
    with pytest.raises(EngineStopped, match="not enough memory"):
        engine.prompt_logprobs(prompt_of(5)).result(timeout=WAIT_S)
    with pytest.raises(EngineStopped, match="not enough memory"):
        engine.prompt_logprobs(prompt_of(5)).result(timeout=WAIT_S)
    assert not engine.healthy


def test_sample_j_of_n_is_the_first_sample_of_seed_plus_j(engine: EmbeddedEngine) -> None:
    together = tokens_of(engine.submit(generation(prompt_of(4), n=5, seed=30)))
    each = [tokens_of(engine.submit(generation(prompt_of(4), seed=30 + j)))[0] for j in range(5)]
    assert together == each
    assert len({tuple(tokens) for tokens in together}) == 5


def test_largest_seeds_and_negative_ones_are_drawn_with(engine: EmbeddedEngine) -> None:
    for seed in (2**63 - 1, -1, -(2**63)):
        one, two = (tokens_of(engine.submit(generation(prompt_of(4), n=2, seed=seed))) for _ in range(2))
        assert one == two


def test_max_tokens_cuts_and_end_of_sequence_stops(engine: EmbeddedEngine) -> None:
    rows = rows_of(engine.submit(generation(prompt_of(3), n=200, max_tokens=10, temperature=2.0)))
    reasons = {row.finish_reason for row in rows}
    assert reasons == {"stop", "length"}
    for row in rows:
        assert len(row.token_ids) == len(row.logprobs)
        if row.finish_reason == "stop":
            assert row.token_ids[-1] == EOS and EOS not in row.token_ids[:-1]
        else:
            assert len(row.token_ids) == 10 and EOS not in row.token_ids


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0], dtype=torch.float64)
    draws = 20_000
    u = torch.from_numpy(uniforms(np.arange(draws, dtype=np.uint64), np.zeros(draws, dtype=np.uint64)))
    tokens, logprobs = drawn(probabilities.log().expand(draws, -1), u)
    counts = torch.bincount(tokens, minlength=5)
    expected = probabilities * draws
    assert counts[4] == 0
    chi_squared = float(((counts - expected)[:4] ** 2 / expected[:4]).sum())
    assert chi_squared < 16.3  # 3 degrees of freedom, p = 0.001; the draws are the same in every run
    assert torch.allclose(logprobs, probabilities.log()[tokens])


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.05, 0.25]], dtype=torch.float64).log().expand(4, -1)
    u = torch.tensor([0.0, 0.2, 0.9999999, 0.5], dtype=torch.float64)
    tokens, logprobs = drawn(logits, u, top_p=[0.7] * 4)
    assert tokens.tolist() == [1, 1, 3, 1]
    assert torch.allclose(logprobs.exp(), torch.tensor([2 / 3, 2 / 3, 1 / 3, 2 / 3], dtype=torch.float64))


@pytest.mark.parametrize(
    ("narrowed", "left"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"min_p": 0.39}, [0, 1, 3]),  # at least 0.39 * 0.5
        ({"min_p": 0.45}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        # of what top_k leaves, 2/3 and 1/3, the first reaches 0.6
        ({"top_k": 2, "top_p": 0.6}, [1]),
        ({"min_p": 0.39, "top_k": 2, "top_p": 0.7}, [1, 3]),
    ],
)
def test_top_k_and_min_p_leave_the_tokens_that_they_name_and_renormalise(
    narrowed: dict[str, float], left: list[int]
) -> None:
    probabilities = torch.tensor([0.2, 0.5, 0.05, 0.25], dtype=torch.float64)
    u = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    rows = {name: [value] * len(u) for name, value in narrowed.items()}
    tokens, logprobs = drawn(probabilities.log().expand(len(u), -1), u, **rows)
    assert sorted(set(tokens.tolist())) == left
    assert torch.allclose(logprobs.exp(), probabilities[tokens] / probabilities[left].sum())


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64).expand(5, -1)
    tokens, logprobs = drawn(
        logits,
        torch.full((5,), 0.01, dtype=torch.float64),
        temperature=[0.0, 0.5, 1.0, 1.0, 1.0],
        top_p=[0.1, 1.0, 1e-9, 1.0, 1.0],
        top_k=[1, 0, 0, 1, 0],
        min_p=[1.0, 0.0, 0.0, 0.0, 1.0],
    )
    assert tokens.tolist() == [1, 0, 1, 1, 1]
    expected = [logits[0].log_softmax(0)[1], (logits[0] / 0.5).log_softmax(0)[0], 0.0, 0.0, 0.0]
    assert np.allclose(logprobs.numpy(), [float(x) for x in expected])


def test_largest_random_number_still_finds_a_token_with_probability() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    tokens, _ = drawn(logits, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1]


@pytest.mark.parametrize("narrowed", [{}, {"top_p": [0.5]}, {"top_k": [2]}, {"min_p": [0.5]}])
def test_logits_that_are_not_finite_are_an_error(narrowed: dict[str, list[float]]) -> None:
    half = torch.tensor([0.5], dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="not finite"):
        drawn(torch.full((1, 3), math.nan, dtype=torch.float64), half, **narrowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_generate_too(model_dir: Path, dtype: torch.dtype) -> None:
    engine = EmbeddedEngine(model_dir, dtype=dtype, max_batch=8)
    engine.start()
    (row,) = rows_of(engine.submit(generation(prompt_of(5))))
    assert row.token_ids and all(logprob <= 0 for logprob in row.logprobs)


def test_stop_string_with_a_space_in_front_ends_the_first_word_too() -> None:
    raw = metaspace("first")
    raw.train_from_iterator(["say 42 0 so 42"], BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    (row,) = generation([3], stop=(" 42",)).rows
    row.token_ids = raw.encode("42").ids  # the space is in its tokens, not in their text
    assert tokenizer.decode(row.token_ids) == "42"
    assert completed_stop_string(row, tokenizer, in_front(tokenizer)) == " 42"
