"""The calculator: what it evaluates, what it refuses, and a model that uses it."""

import asyncio
import threading
import time
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.client import EngineClient
from rollout.environments.calculator import HINT, MAX_CALLS, ExpressionError, answer, calculator, evaluate
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import Group, Sample
from tests.rollout.collecting import collect
from tests.rollout.rollout_helpers import serving
from tests.rollout.scripted import ScriptedClient, text_of
from trainer.model.tiny import CHARACTERS, SPECIAL, make_model, make_tokenizer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("27+58", "85"),
        (" 2 * ( 3 + 4 ) - 1 ", "13"),
        ("8-3-2", "3"),
        ("100/10/2", "5"),
        ("-2*-(3)", "6"),
        ("0.1+0.2", "0.3"),
        (".5*4", "2"),
        ("1/3", "0.3333333333"),
        ("99999999*99999999", "9999999800000001"),
        ("1/3*3", "1"),
    ],
)
def test_value_of_an_expression(expression: str, value: str) -> None:
    assert answer(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "unexpected end"),
        ("1+", "unexpected end"),
        ("1 2", "unexpected '2'"),
        ("(1+2", "not closed"),
        ("1+2)", "unexpected '\\)'"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("9**9**9**9", "unexpected '\\*'"),
        ("1e999", "cannot read 'e'"),
        ("2^64", "cannot read '\\^'"),
        ("__import__('os')", "cannot read '_'"),
        ("\u0661+\u0662", "cannot read '\u0661'"),
        ("(" * 100 + ")" * 100, "nested too deeply"),
        ("-" * 190 + "1", "nested too deeply"),
        ("9" * 41, "too large"),
        ("9999999999*" * 15 + "9", "too large"),
        ("1/9999999999" * 15, "too large"),
        ("1+" * 200 + "1", "too long"),
        ("1." + "0" * 10**6, "too long"),
    ],
)
def test_what_has_no_value_is_refused_at_once(expression: str, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(ExpressionError, match=reason):
        evaluate(expression)
    assert time.monotonic() - started < 30
    assert answer(expression).startswith("error: ") and "\n" not in answer(expression)


@given(st.text(alphabet="0123456789+-*/(). <\n", max_size=60))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    assert len(answer(text)) < 60


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: "".join(parts))
        | inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_value_is_what_python_says(expression: str) -> None:
    python_value = eval(expression, {"__builtins__": {}})  # of digits, + - * and parentheses only
    try:
        assert evaluate(expression) == Fraction(python_value)
    except ExpressionError as error:
        assert "too" in str(error)


def play(client: EngineClient, task: dict[str, Any], **sampling: Any) -> list[Sample]:
    setting = Sampling(**{"n": 1, "max_tokens": 100, **sampling})

    async def main() -> list[Sample]:
        samples = await calculator(task, Policy(client, setting, 5), setting)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return samples

    return asyncio.run(main())


class Interrupted(ScriptedClient):
    """An engine at a stop string: its tokens are there, the text ends before it."""

    async def generate(self, prompt: Any, sampling: Sampling) -> Any:
        (turn,) = await super().generate(prompt, sampling)
        for stop in sampling.stop:
            if turn.text.endswith(stop):
                text = turn.text.removesuffix(stop)
                return [type(turn)(**{**vars(turn), "text": text, "stop_string": stop})]
        return [turn]


def test_values_are_appended_untrained_and_the_reward_sees_what_follows_the_last() -> None:
    client = Interrupted("27+58 is <<27+58>>", "reversed <<1/0>>", "58.")
    (sample,) = play(client, {"id": "1", "prompt": "27+58="})
    assert text_of(sample) == "27+58=27+58 is <<27+58>>=85\nreversed <<1/0>>=error: division by zero\n58."
    assert text_of(sample, trained=True) == "27+58 is <<27+58>>reversed <<1/0>>58."
    assert (sample.text, sample.metrics, sample.reward) == ("58", {"calls": 2.0}, None)
    assert [(turn.role, turn.text, turn.finish_reason) for turn in sample.turns] == [
        ("environment", "27+58=", None),
        ("assistant", "27+58 is <<27+58>>", "stop"),
        ("environment", "=85\n", None),
        ("assistant", "reversed <<1/0>>", "stop"),
        ("environment", "=error: division by zero\n", None),
        ("assistant", "58", "stop"),
    ]


def test_chat_goes_on_in_the_assistants_turn_and_is_told_of_the_calculator() -> None:
    client = Interrupted("<<1+1>>", "2.")
    (sample,) = play(client, {"id": "1", "messages": [{"role": "user", "content": "1+1?"}]})
    assert text_of(sample) == f"u{HINT}\n\n1+1?.a<<1+1>>=2\n2."


def test_model_that_never_stops_calling_is_stopped() -> None:
    client = Interrupted(*["<<1>>"] * 20)
    (sample,) = play(client, {"id": "1", "prompt": "go"})
    assert sample.metrics == {"calls": float(MAX_CALLS)} and len(client.asked) == MAX_CALLS + 1
    assert client.asked[-1][1].stop == ()


def test_call_that_was_cut_is_not_answered() -> None:
    (sample,) = play(Interrupted("<<1+1>>"), {"id": "1", "prompt": "go"}, max_tokens=4)
    assert text_of(sample) == "go<<1+" and sample.finish_reason == "length"


TOKENS = [*SPECIAL, *CHARACTERS]
SAID = {"<": 0.3, ">": 0.3, "1": 0.2, "+": 0.1, "<eos>": 0.1}


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """builtin:tiny's tokenizer and architecture, but it says each of SAID with this probability, always."""
    path = tmp_path_factory.mktemp("calling")
    tokenizer, model = make_tokenizer(), make_model(0)
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 100.0  # so large that every last state is this direction, of length sqrt(width)
        head = torch.zeros_like(embeddings)
        head[:, 0] = -30.0
        for token, probability in SAID.items():
            head[tokenizer.convert_tokens_to_ids(token), 0] = np.log(probability)
        model.lm_head.weight = torch.nn.Parameter(head / np.sqrt(embeddings.shape[1]))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_calls_of_a_real_engine_through_the_collector(calling_model: Path) -> None:
    groups: list[Group] = []
    kinds: tuple[dict[str, Any], ...] = (
        {"prompt": "27+58="},
        {"messages": [{"role": "user", "content": "27+58="}]},
    )

    async def main(url: str) -> None:
        async with EngineClient(url) as client:
            await collect(
                [Slot(k, {"id": str(k), "answer": "1", **kinds[k % 2]}, seed=100 * k) for k in range(16)],
                client=client,
                environment=calculator,
                reward=resolve_reward("numeric"),
                sampling=Sampling(n=4, max_tokens=40),
                settings=RolloutSettings(concurrency=64),
                on_group=groups.append,
                stop=threading.Event(),
            )

    with serving(calling_model) as server:
        asyncio.run(main(server.url))
    assert [group.given_up for group in groups] == [None] * 16
    samples = [sample for group in groups for sample in group.samples]
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    called = [sample for sample in samples if sample.metrics["calls"]]
    assert len(called) > 10 and any(sample.finish_reason == "stop" for sample in called)
    for sample in called:
        _, *turns = segments(sample)
        shown = sample.turns[1:] if sample.turns[0].begin is None else sample.turns  # without HINT
        assert "".join(turn.text for turn in shown) == "".join(turns).replace("<eos>", "")
        for said, observed in zip(turns[::2], turns[1::2], strict=False):
            expression = said.removesuffix(">>").removesuffix("<eos>").rpartition("<<")[2]
            assert observed == f"={answer(expression)}\n"
        trained = sample.loss_mask == 1
        assert np.count_nonzero(trained) <= 40
        expected = [np.log(SAID[TOKENS[token]]) for token in sample.token_ids[trained]]
        np.testing.assert_allclose(sample.logprobs[trained], expected, atol=1e-3)


def segments(sample: Sample) -> list[str]:
    """The prompt, then by turns what was said and what was observed."""
    parts = groupby(zip(sample.token_ids, sample.loss_mask, strict=True), key=lambda pair: pair[1])
    return ["".join(TOKENS[token] for token, _ in pairs) for _, pairs in parts]
