"""An engine that says what a test tells it, and an agent that talks to a session over HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest

from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import serve
from rollout.environments.openai_proxy import AgentSession
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.trajectory import Sample

T = TypeVar("T")
Messages = list[dict[str, Any]]


class ScriptedClient(EngineClient):
    """Says one line after the other, a token a character; a message is its role's first letter and its
    content, and a turn ends with `.`.
    """

    def __init__(self, *lines: str | Exception) -> None:
        super().__init__("http://127.0.0.1:1")
        self.lines = list(lines)
        self.asked: list[tuple[Any, Sampling]] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt, sampling))
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        cut = len(line) > sampling.max_tokens
        line = line[: sampling.max_tokens]
        prompt_ids = ids(prompt) if isinstance(prompt, str) else prompt
        text = line.rstrip(".")
        likely = [(token, {"z": -9.0, token: -0.5}) for token in line] if "logprobs" in sampling.more else ()
        reason = "length" if cut else "stop"
        return [Completion(prompt_ids, ids(line), [-0.5] * len(line), text, reason, likely=likely)]

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        if isinstance(text, str):
            return ids(text)
        return ids("".join(f"{m['role'][0]}{m['content']}." for m in text) + "a")


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(sample: Sample, trained: bool = False) -> str:
    return "".join(
        chr(t) for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m or not trained
    )


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


class Agent:
    """Talks to a session with plain HTTP."""

    def __init__(self, session: AgentSession, http: aiohttp.ClientSession) -> None:
        self.session, self.http = session, http

    async def post(self, body: dict[str, Any], key: str | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key or self.session.api_key}"}
        async with self.http.post(
            self.session.base_url + "/chat/completions", json=body, headers=headers
        ) as answer:
            return answer.status, await answer.text()

    async def ask(self, messages: Messages, **fields: Any) -> Messages:
        """The messages and the reply."""
        status, text = await self.post({"model": "m", "messages": messages, **fields})
        assert status == 200, text
        return [*messages, json.loads(text)["choices"][0]["message"]]


def run_session(
    client: EngineClient, play: Callable[[Agent], Awaitable[T]], **sampling: Any
) -> tuple[T, list[Sample]]:
    """What the agent returns, and the samples; nothing may be left of the session."""

    async def main() -> tuple[T, list[Sample]]:
        policy = Policy(client, Sampling(**{"max_tokens": 50, **sampling}), 1000)
        async with aiohttp.ClientSession() as http:
            async with serve(policy, 2) as session:
                result = await play(Agent(session, http))
                samples = session.samples()
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.get(session.base_url + "/models")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result, samples

    return asyncio.run(main())
