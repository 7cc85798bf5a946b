"""The wire between an agent and a session: the shapes of the OpenAI API, and what is refused."""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from rollout.engines.client import EngineClient, Sampling
from rollout.environments import policy as policy_module
from rollout.environments.environment import serve
from rollout.environments.policy import Policy
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import Agent, Messages, ScriptedClient, run_session, user


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
        ({"n": 2}, "n: not supported here; ask once for each"),
        ({"logprobs": True}, "logprobs: not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "a"}]}, "messages.0.role: must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content: only parts of the type text",
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
    monkeypatch.setattr(policy_module, "_warned", set())

    async def play(agent: Agent) -> None:
        for name in "ab":
            await agent.ask(user(name), temperature=0.25, top_p=1.0, seed=None, metadata={}, tools=[])

    client = ScriptedClient("1.", "2.")
    run_session(client, play, temperature=0.5)
    assert [sampling.temperature for _, sampling in client.asked] == [0.5, 0.5]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("an agent asks for its own temperature: ignored")


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
