"""The wire between an agent and a session: the shapes of the OpenAI API, and what is refused."""

import asyncio
import json
import logging
from typing import Any

import aiohttp
import openai
import pytest

from rollout import tally
from rollout.engines.answers import EngineFacts
from rollout.engines.client import EngineClient
from rollout.engines.completion import completion_request
from rollout.environments.environment import serve
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.trajectory import Sample
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import Agent, Messages, ScriptedClient, run_session, user

FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_answers_have_the_shape_of_the_api() -> None:
    async def play(agent: Agent) -> list[Any]:
        plain = await agent.post({"model": "any", "messages": user("a")})
        stream = await agent.post(
            {"messages": user("b"), "stream": True, "stream_options": {"include_usage": True}}
        )
        async with agent.http.get(
            agent.session.base_url + "/models", headers={"Authorization": f"Bearer {agent.session.api_key}"}
        ) as models:
            return [json.loads(plain[1]), stream[1], await models.json()]

    (plain, stream, models), _ = run_session(ScriptedClient("1.", "2."), play)
    assert plain["object"] == "chat.completion" and plain["model"] == "any"
    assert plain["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "1", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert stream.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [
        {"role": "assistant", "content": "2"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:2]] == [None, "stop"]
    assert chunks[2]["choices"] == [] and chunks[2]["usage"]["completion_tokens"] == 2
    assert [card["id"] for card in models["data"]] == ["policy"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        ({"functions": [{"name": "f"}]}, "functions: not supported here; use tools"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 129}, "n: Input should be less than or equal to 128"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: must be text, json_object or"),
        ({"response_format": {}}, "response_format.type: must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must have a `schema`"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
            "response_format.json_schema: must have a `schema`, a JSON schema as an object",
        ),
        (
            {"tools": [FUNCTION], "response_format": {"type": "json_object"}},
            "response_format: not supported beside tools",
        ),
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "a"}]}, "messages.0.role: must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content: only parts of the type text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}
                ]
            },
            "messages.0.content: image_url: must be data:image/...;base64,..., got 'a.png'",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be a string"),
        ({"stop": ""}, "stop: a stop string must not be empty"),
        ({"max_tokens": 0}, "max_tokens: "),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(fields: dict[str, Any], reason: str) -> None:
    async def play(agent: Agent) -> tuple[int, str]:
        return await agent.post({"messages": user("a"), **fields})

    ((status, text), samples) = run_session(ScriptedClient(), play)
    error = json.loads(text)["error"]
    assert status == 400 and error["message"].startswith(reason) and "\n" not in error["message"]
    assert samples == []


def test_sampling_of_an_agent_is_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "_warned", set())

    async def play(agent: Agent) -> None:
        for name in "ab":
            await agent.ask(user(name), temperature=0.25, top_p=1.0, seed=None, metadata={}, tools=[])

    client = ScriptedClient("1.", "2.")
    run_session(client, play, temperature=0.5)
    assert [sampling.temperature for _, sampling in client.asked] == [0.5, 0.5]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("an agent asks for its own temperature: ignored")


def test_choices_and_logprobs_have_the_shape_of_the_api() -> None:
    async def play(agent: Agent) -> list[Any]:
        fields = {"n": 2, "logprobs": True, "top_logprobs": 1}
        plain = await agent.post({"messages": user("a"), **fields})
        stream = await agent.post(
            {"messages": user("b"), "stream": True, "stream_options": {"include_usage": True}, **fields}
        )
        return [json.loads(plain[1]), stream[1]]

    (plain, stream), _ = run_session(ScriptedClient("1.", "2.", "3.", "ü."), play)
    assert [(one["index"], one["message"]["content"]) for one in plain["choices"]] == [(0, "1"), (1, "2")]
    end = {"token": ".", "logprob": -0.5, "bytes": [46]}
    assert plain["choices"][0]["logprobs"] == {
        "content": [
            {
                **{"token": "1", "logprob": -0.5, "bytes": [49]},
                "top_logprobs": [{"token": "1", "logprob": -0.5, "bytes": [49]}],
            },
            {**end, "top_logprobs": [end]},
        ],
        "refusal": None,
    }
    assert plain["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    chunks = [json.loads(event.removeprefix("data: ")) for event in stream.split("\n\n")[:-2]]
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(one["index"], one["delta"].get("content"), one["finish_reason"]) for one in said] == [
        (0, "3", None),
        (0, None, "stop"),
        (1, "ü", None),
        (1, None, "stop"),
    ]
    assert said[2]["logprobs"]["content"][0]["bytes"] == [0xC3, 0xBC]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_engine_is_asked_for_logprobs_and_for_the_form() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}

    async def play(agent: Agent) -> None:
        await agent.post({"messages": user("a"), "logprobs": True, "response_format": {"type": "text"}})
        await agent.post({"messages": user("a"), "top_logprobs": 0, "response_format": form})

    client = ScriptedClient("1.", "2.")
    run_session(client, play)
    asked = [sampling.more for _, sampling in client.asked]
    assert asked == [{"logprobs": 0}, {"response_format": form}]
    assert completion_request([1], client.asked[1][1])["response_format"] == form


def test_form_is_refused_where_the_loss_does_not_correct_for_it() -> None:
    async def play(agent: Agent) -> tuple[int, str]:
        return await agent.post({"messages": user("a"), "response_format": {"type": "json_object"}})

    client = ScriptedClient("1.")
    client.facts = EngineFacts(why_no_form="trainer.engine_correction=off")
    (status, text), samples = run_session(client, play)
    message = json.loads(text)["error"]["message"]
    assert status == 400 and "trainer.engine_correction=off" in message and "\n" not in message
    assert samples == [] and client.asked == []


def test_embedded_engine_refuses_what_it_cannot_do_and_the_conversation_stays(server: RunningServer) -> None:
    async def play(agent: Agent) -> list[tuple[int, str]]:
        so_far = await agent.ask(user("27+58="), max_tokens=8, logprobs=True)
        asked = [{"response_format": {"type": "json_object"}}, {"logprobs": True, "top_logprobs": 2}]
        return [await agent.post({"messages": [*so_far, *user("b")], **fields}) for fields in asked]

    async def main() -> tuple[list[tuple[int, str]], list[Sample]]:
        async with (
            EngineClient(server.url) as client,
            aiohttp.ClientSession() as http,
            serve(Policy(client, Sampling(max_tokens=32), 9)) as session,
        ):
            return await play(Agent(session, http)), session.samples()

    answers, (sample,) = asyncio.run(main())
    assert [status for status, _ in answers] == [400, 400]
    messages = [json.loads(text)["error"]["message"] for _, text in answers]
    assert "response_format: the embedded engine has no grammar" in messages[0] and "\n" not in messages[0]
    assert "logprobs: only 0" in messages[1]
    assert 0 < sample.loss_mask.sum() <= 8


def test_conversation_that_fills_the_context_ends_also_if_logprobs_are_asked_for(
    server: RunningServer,
) -> None:
    async def main() -> tuple[int, Any, list[Sample]]:
        async with (
            EngineClient(server.url) as client,
            aiohttp.ClientSession() as http,
            serve(Policy(client, Sampling(max_tokens=32), 9)) as session,
        ):
            agent = Agent(session, http)
            so_far = await agent.ask(user("27+58="), max_tokens=8, logprobs=True)
            messages = [*so_far, *user("b" * 20_000)]
            for _ in range(3):  # an agent may not look at finish_reason
                status, text = await agent.post({"messages": messages, "logprobs": True})
                choice = json.loads(text)["choices"][0]
                messages = [*messages, choice["message"], *user("b" * 20_000)]
            return status, choice, session.samples()

    status, choice, (sample,) = asyncio.run(main())
    assert (status, choice["finish_reason"], choice["logprobs"]["content"]) == (200, "length", [])
    assert sample.finish_reason == "length" and sample.loss_mask.any()


def test_port_is_closed_to_those_without_the_key() -> None:
    async def play(agent: Agent) -> tuple[int, str]:
        return await agent.post({"messages": user("a")}, key="guessed")

    ((status, text), samples) = run_session(ScriptedClient("1."), play)
    assert status == 401 and "session.api_key" in text and samples == []


def test_openai_client_of_python(server: RunningServer) -> None:
    async def main() -> None:
        async with (
            EngineClient(server.url) as client,
            serve(Policy(client, Sampling(max_tokens=32), 9)) as session,
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent,
        ):
            messages: Messages = user("27+58=")
            completions: Any = agent.chat.completions
            answer = await completions.create(model="policy", messages=messages, max_tokens=8)
            messages += [answer.choices[0].message.model_dump(), *user("sure")]
            text, reason = "", None
            stream = await completions.create(model="policy", messages=messages, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            with pytest.raises(openai.BadRequestError, match="chat template leaves out tools"):
                await completions.create(
                    model="policy", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
                )
            assert [model.id async for model in agent.models.list()] == ["policy"]
            (sample,) = session.samples()
            assert (sample.text, sample.finish_reason) == (text, reason)
            assert sample.loss_mask.sum() > answer.usage.completion_tokens

    asyncio.run(main())
