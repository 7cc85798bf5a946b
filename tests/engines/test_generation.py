"""What every engine generates: the tokens and logprobs that transformers has for the same weights."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from coordinator.machine.network import LOOPBACK
from rollout.engines.answers import UNIX, EngineFacts, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.engines.special_tokens import SpecialTokens
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.rewards.endpoint import EndpointError
from rollout.rewards.teacher import Teacher
from rollout.settings import EngineSettings
from rollout.trajectory import Sample
from tests.engines.engines import Engine, Reference
from tests.models import CONTEXT, EOS

TOLERANCE = 1e-4
"""Largest difference of a logprob in float32."""
PROMPT = "12+34="


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, reference: Reference, temperature: float
) -> None:
    sampling = Sampling(n=32, max_tokens=60, temperature=temperature, seed=3)
    completions = engine.ask(PROMPT, sampling)
    assert max(reference.error(completion, temperature) for completion in completions) < TOLERANCE


@pytest.mark.parametrize(
    "narrowed", [{"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 8, "top_p": 0.9}]
)
def test_logprobs_of_narrowed_sampling_are_those_of_the_tokens_that_were_left(
    engine: Engine, reference: Reference, narrowed: dict[str, Any]
) -> None:
    sampling = Sampling(n=8, max_tokens=20, temperature=0.7, seed=3, **narrowed)
    for completion in engine.ask(PROMPT, sampling):
        tokens, begin = completion.prompt_ids + completion.token_ids, len(completion.prompt_ids)
        wanted = reference.narrowed(tokens, 0.7, **narrowed)[begin - 1 :]
        assert np.allclose(completion.logprobs, wanted, rtol=0, atol=TOLERANCE)


def test_greedy_takes_the_tokens_of_transformers_with_logprobs_of_temperature_1(
    engine: Engine, reference: Reference
) -> None:
    for prompt in (PROMPT, "abc", "(1+2)*3="):
        (completion,) = engine.ask(prompt, Sampling(max_tokens=60, temperature=0.0))
        assert completion.token_ids == reference.greedy(completion.prompt_ids, 60)
        assert reference.error(completion) < TOLERANCE


def test_engine_says_how_much_it_has_generated(engine: Engine) -> None:
    before = engine.admin.generated()
    completions = engine.ask(PROMPT, Sampling(n=3, max_tokens=8, temperature=1.0, seed=1))
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert engine.admin.generated().since(before) == (tokens, 3)


NUMBER = {
    "type": "json_schema",
    "json_schema": {"name": "number", "schema": {"type": "integer", "minimum": 100, "maximum": 999}},
}


def test_logprobs_under_a_form_are_those_of_the_distribution_that_the_form_leaves(
    engine: Engine, reference: Reference
) -> None:
    """So pi / mu, the weight of the loss, is the policy's own probability of all tokens that may come."""

    async def main() -> list[Completion]:
        async with EngineClient(engine.url) as client:
            more = {"response_format": NUMBER}
            sampling = Sampling(n=16, max_tokens=20, temperature=0.7, seed=3, more=more)
            return await client.generate(PROMPT, sampling)

    if engine.kind == "torch":
        with pytest.raises(RequestRefused, match="response_format: the embedded engine has no grammar"):
            asyncio.run(main())
        return
    encode = reference.tokenizer.convert_tokens_to_ids
    allowed = [encode(list("123456789")), *[encode(list("0123456789"))] * 2, [EOS]]
    completions = asyncio.run(main())
    for completion in completions:
        assert 100 <= int(completion.text) <= 999 and len(completion.token_ids) == 4
        assert completion.finish_reason == "stop" and completion.logprobs[-1] == 0.0
        for at, tokens in enumerate(allowed):
            said = completion.prompt_ids + completion.token_ids[:at]
            all_of = np.logaddexp.reduce([reference.logprobs([*said, token], 0.7)[-1] for token in tokens])
            policy = reference.logprobs([*said, completion.token_ids[at]], 0.7)[-1]
            assert abs(completion.logprobs[at] - (policy - all_of)) < TOLERANCE
            assert policy <= completion.logprobs[at] + TOLERANCE
    assert len({completion.text for completion in completions}) > 1


def test_form_that_the_vocabulary_cannot_write_is_refused_and_the_engine_serves_on(engine: Engine) -> None:
    if engine.kind == "torch":
        pytest.skip("the embedded engine has no grammar")
    schema = {"type": "string", "pattern": "^☃+$"}
    form = {"type": "json_schema", "json_schema": {"name": "snow", "schema": schema}}
    sampling = Sampling(max_tokens=20, seed=3, more={"response_format": form})
    with pytest.raises(RequestRefused, match=r"500: .* answers another request"):
        engine.ask(PROMPT, sampling, retry_s=2.0)
    assert engine.ask(PROMPT, Sampling(max_tokens=3))


def test_likeliest_tokens_come_with_their_logprobs(engine: Engine, reference: Reference) -> None:
    async def main(count: int) -> Completion:
        async with EngineClient(engine.url) as client:
            sampling = Sampling(max_tokens=5, temperature=0.7, seed=3, more={"logprobs": count})
            (completion,) = await client.generate(PROMPT, sampling)
            return completion

    completion = asyncio.run(main(0))
    assert len(completion.likely) == len(completion.token_ids)
    assert [token for token, _ in completion.likely] == [
        reference.tokenizer.convert_ids_to_tokens(token) for token in completion.token_ids
    ]
    if engine.kind == "torch":
        with pytest.raises(RequestRefused, match="only 0"):
            asyncio.run(main(3))
        return
    completion = asyncio.run(main(3))
    for at, (_, likely) in enumerate(completion.likely):
        said = completion.prompt_ids + completion.token_ids[:at]
        for token, logprob in likely.items():
            wanted = reference.logprobs([*said, reference.tokenizer.convert_tokens_to_ids(token)], 0.7)[-1]
            assert len(likely) in (3, 4) and abs(logprob - wanted) < TOLERANCE


def test_engine_says_how_many_samples_it_generates_at_once(engine: Engine) -> None:
    facts = engine.admin.facts()
    assert facts.is_seeded == (engine.kind == "torch")
    if engine.kind == "torch":
        assert facts.samples == EngineSettings().max_batch
    else:
        assert engine.admin.most_samples() == facts.samples == 128, "vLLM's own default without a GPU"


def test_logprobs_of_a_prompt_are_those_of_transformers(engine: Engine, reference: Reference) -> None:
    token_ids = reference.tokenizer.encode("12+34=46, (7*8)-9 is not 48")
    found = engine.admin.prompt_logprobs(token_ids)
    wanted = reference.logprobs(token_ids)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < TOLERANCE


def test_client_gets_the_same_logprobs(engine: Engine, reference: Reference) -> None:
    token_ids = reference.tokenizer.encode("12+34=46")

    async def score() -> list[float]:
        async with EngineClient(engine.url) as client:
            return await client.prompt_logprobs(token_ids)

    wanted = reference.logprobs(token_ids)
    assert np.abs(np.array(asyncio.run(score())) - wanted).max() < TOLERANCE


def test_any_engine_may_be_a_teacher(engine: Engine, reference: Reference) -> None:
    (completion,) = engine.ask(PROMPT, Sampling(max_tokens=20, temperature=1.0, seed=1))
    token_ids = [*completion.prompt_ids, *completion.token_ids]
    mask = np.array([0] * len(completion.prompt_ids) + [1] * len(completion.token_ids), np.uint8)
    nothing = np.zeros(len(token_ids), np.float32)
    sample = Sample(np.array(token_ids, np.int32), mask, nothing, "stop", completion.text)

    async def relay(ended: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(engine.url.removeprefix(UNIX))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, back), copy(there, writer))
        ended.set()

    async def ask(text: str) -> np.ndarray:
        """The teacher is reached by TCP, the engine of this test by a Unix socket."""
        ended = asyncio.Event()
        async with await asyncio.start_server(partial(relay, ended), LOOPBACK, 0) as server:
            host, port = server.sockets[0].getsockname()
            teacher = Teacher(f"http://{host}:{port}/v1,retries=0")
            try:
                return await teacher.logprobs(replace(sample, text=text))
            finally:
                await teacher.close()
                await ended.wait()

    found = asyncio.run(ask(completion.text))
    wanted = np.array([0, *reference.logprobs(token_ids)]) * mask
    assert np.abs(found - wanted).max() < TOLERANCE
    with pytest.raises(EndpointError, match="needs the tokenizer of the policy"):
        asyncio.run(ask("something else"))


def test_256_requests_at_once_draw_what_each_draws_alone(engine: Engine) -> None:
    # Together more prompt tokens than a step of the engine takes: one of them would be split.
    requests = [(f"{'12+' * 12}{i}+{7 * i}=", Sampling(max_tokens=40, seed=i)) for i in range(256)]
    together = [ids_of(completions) for completions in engine.ask_at_once(requests)]
    again = [ids_of(completions) for completions in engine.ask_at_once(requests)]
    alone = [ids_of(engine.ask(*request)) for request in requests[:24]]
    assert len({str(drawn) for drawn in together}) > 200
    # float32 rounds differently in other company, which may flip a token where two are nearly as likely.
    assert sum(a != b for a, b in zip(together, again, strict=True)) <= 4
    assert sum(a != b for a, b in zip(together, alone, strict=False)) <= 2


def test_completion_j_of_a_seed_is_what_sample_j_draws_by_itself(engine: Engine) -> None:
    sampling = Sampling(n=8, max_tokens=30)

    async def main() -> tuple[list[Completion], list[list[Completion]]]:
        async with EngineClient(engine.url) as client:
            policy = Policy(client, sampling, seed=2**62 - 4)
            group = await policy.generate(PROMPT, n=8)
            return group, [await policy.for_sample(j).generate(PROMPT) for j in range(8)]

    group, single = asyncio.run(main())
    assert ids_of(group) == [completion.token_ids for (completion,) in single]
    assert len({str(completion.token_ids) for completion in group}) == 8


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    request = (PROMPT, Sampling(max_tokens=30))
    answers = {str(ids_of(completions)) for completions in engine.ask_at_once([request] * 12)}
    assert len(answers) > 6  # answers of one or two tokens are the same now and then


def test_token_ids_are_continued_as_the_text_is(engine: Engine) -> None:
    sampling = Sampling(n=3, max_tokens=5, seed=9)
    completions = engine.ask(PROMPT, sampling)
    assert len(completions[0].prompt_ids) == len(PROMPT)
    assert ids_of(engine.ask(completions[0].prompt_ids, sampling)) == ids_of(completions)


def test_completion_that_stops_by_itself_holds_the_end_of_sequence_token_and_its_text_does_not(
    engine: Engine, reference: Reference
) -> None:
    completions = engine.ask(PROMPT, Sampling(n=200, max_tokens=10, temperature=2.0, seed=1))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert stopped and cut and len(stopped) + len(cut) == 200
    for completion in stopped:
        assert completion.token_ids[-1] == EOS and EOS not in completion.token_ids[:-1]
    for completion in cut:
        assert EOS not in completion.token_ids and len(completion.token_ids) == 10
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.text == reference.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


MARKS = SpecialTokens({"<pad>": 0, "<unk>": 2})


@pytest.mark.parametrize("stop", [("<unk>",), ("<pad>", "<unk>")])
def test_stop_string_that_is_a_special_token_ends_the_completion(
    engine: Engine, stop: tuple[str, ...]
) -> None:
    """Decoding leaves such a token out of the text, which a stop string is searched in."""
    ids = {MARKS.ids[text] for text in stop}
    sampling = Sampling(n=200, max_tokens=30, temperature=2.0, seed=1, stop=stop)
    completions = engine.ask(PROMPT, sampling, facts=EngineFacts(special_tokens=MARKS))
    stopped = [one for one in completions if one.stop_string]
    assert {one.token_ids[-1] for one in stopped} == ids and {one.stop_string for one in stopped} == {*stop}
    for completion in completions:
        assert not ids & {*completion.token_ids[:-1]} and "<" not in completion.text
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in {EOS, *ids})


def test_sequence_ends_at_every_end_of_the_model_and_its_text_before(
    engine: Engine, reference: Reference
) -> None:
    """Also at a token that decoding shows."""
    end = reference.tokenizer.convert_tokens_to_ids("7")
    facts = EngineFacts(special_tokens=SpecialTokens({}, (EOS, end)))
    completions = engine.ask(PROMPT, Sampling(n=100, max_tokens=30, seed=1), facts=facts)
    assert {one.token_ids[-1] for one in completions if one.finish_reason == "stop"} == {EOS, end}
    for completion in completions:
        assert end not in completion.token_ids[:-1]
        assert "7" not in completion.text and not completion.stop_string


def test_end_of_the_reasoning_that_is_a_special_token_is_in_the_text(engine: Engine) -> None:
    sampling = Sampling(n=100, max_tokens=30, temperature=2.0, seed=1, reasoning_end="<unk>")
    completions = engine.ask(PROMPT, sampling, facts=EngineFacts(special_tokens=MARKS))
    for completion in completions:
        assert completion.text.count("<unk>") == completion.token_ids.count(2)
        assert "<pad>" not in completion.text
    assert any("<unk>" in completion.text for completion in completions)


def test_stop_string_ends_the_completion_at_the_token_that_completes_it(engine: Engine) -> None:
    plain = engine.ask(PROMPT, Sampling(n=32, max_tokens=20, seed=100))
    j = next(j for j, completion in enumerate(plain) if len(completion.text) == 20)
    stop = plain[j].text[8:10]
    end = plain[j].text.index(stop)
    sampling = Sampling(max_tokens=20, stop=("\n\n\n\n", stop), seed=100 + j)
    (stopped,) = engine.ask(PROMPT, sampling)
    assert (stopped.finish_reason, stopped.text) == ("stop", plain[j].text[:end])
    assert stopped.token_ids == plain[j].token_ids[: end + 2]
    assert len(stopped.logprobs) == end + 2


def test_prompt_longer_than_the_context_is_refused_and_the_engine_serves_on(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match=f"fills the engine's context of {CONTEXT}"):
        engine.ask("1" * (CONTEXT + 1), Sampling(max_tokens=1))
    assert engine.ask("1" * (CONTEXT - 1), Sampling(max_tokens=1))


def test_messages_and_observations_are_tokenised_as_transformers_does(
    engine: Engine, reference: Reference
) -> None:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "4"}]
    wanted = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert engine.tokenize(messages) == wanted
    assert engine.tokenize(" no, 3\n") == reference.tokenizer.encode(" no, 3\n", add_special_tokens=False)


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]
