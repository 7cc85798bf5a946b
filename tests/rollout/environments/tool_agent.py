"""A client of the OpenAI API that has the tool add, and answers of models that call it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from rollout.environments.environment import serve
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.trajectory import Sample

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "unit": {"type": "string"}},
        },
    },
}
NOTE: dict[str, Any] = {"type": "function", "function": {"name": "note"}}
QWEN_CALL = (
    "<think>\nSum.\n</think>\n\nI add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call>'
)


def with_client(
    client: Any, play: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **sampling: Any
) -> tuple[Any, list[Sample]]:
    """What an agent with the client of OpenAI returns, and the samples."""

    async def main() -> tuple[Any, list[Sample]]:
        policy = Policy(client, Sampling(**{"max_tokens": 400, **sampling}), 7)
        async with (
            serve(policy) as session,
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent,
        ):
            return await play(agent), session.samples()

    return asyncio.run(main())


async def ask(agent: openai.AsyncOpenAI, messages: list[Any], **fields: Any) -> Any:
    completions: Any = agent.chat.completions
    answer = await completions.create(model="policy", messages=messages, **{"tools": [ADD], **fields})
    return answer.choices[0]


def result(call: Any, content: str = "85") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": content}
