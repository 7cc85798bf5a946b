"""Tools as a conversation begins with them: shown by the chat template, or refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion, ToolCall
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.trajectory import Sample
from tests.rollout.environments.tool_agent import ADD, NOTE, QWEN_CALL, ask, result, with_client
from tests.rollout.rollout_helpers import serving
from tests.rollout.scripted import ScriptedClient, run_session, user
from tests.rollout.templated import (
    LLAMA3,
    MISTRAL3,
    PYTHONIC,
    QWEN3,
    TemplatedClient,
    make_tokenizer,
)

CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add"}}]}


def test_other_tools_begin_another_conversation_with_the_calls_as_the_template_writes_them(
    tmp_path: Path,
) -> None:
    client = TemplatedClient(tmp_path, QWEN3, QWEN_CALL + "<|im_end|>", "85<|im_end|>")

    async def play(agent: openai.AsyncOpenAI) -> None:
        first = await ask(agent, user("a"))
        call = first.message.tool_calls[0]
        await ask(agent, [*user("a"), first.message, result(call)], tools=[ADD, NOTE])

    _, (one, other) = with_client(client, play)
    text = str(client.tokenizer.decode(other.token_ids))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call>' in text
    assert one.loss_mask.sum() > other.loss_mask.sum() == len(client.tokenizer.encode("85<|im_end|>"))


@pytest.mark.parametrize(
    ("template", "fields", "reason"),
    [
        (QWEN3, {"tool_choice": "required"}, "tool_choice: not supported here; a call that is forced"),
        (QWEN3, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: not supp"),
        (QWEN3, {"parallel_tool_calls": False}, "parallel_tool_calls: not supported here"),
        (QWEN3, {"tools": [{"type": "web_search"}]}, "tools.0.type: "),
        (QWEN3, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        (QWEN3, {"messages": [*user("a"), CALLED]}, "messages.1.tool_calls: must be a list of calls"),
        (QWEN3.replace("if tools", "if false"), {}, "the model's chat template leaves out tools"),
        (
            PYTHONIC,
            {},
            r"the model's chat template writes a tool call in none of the forms hermes, .* but as "
            r".*look_up\(\).*: set rollout.tool_parser",
        ),
        (MISTRAL3, {"messages": [*user("a"), {"role": "tool", "content": "1"}]}, "the model's .* length 9"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_in_one_line(
    template: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    client = TemplatedClient(tmp_path, template)
    body = {"messages": user("a"), "tools": [ADD], **fields}
    (status, text), samples = run_session(client, lambda agent: agent.post(body))
    message = json.loads(text)["error"]["message"]
    assert status == 400 and "\n" not in message and samples == []
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(message)


def test_parser_of_the_setting_is_taken_where_the_template_writes_no_calls(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, PYTHONIC, 'add{"a": 1}<|im_end|>')
    first, _ = with_client(client, lambda agent: ask(agent, user("a")), tool_parser="mistral")
    assert first.message.tool_calls[0].function.name == "add"


def test_environment_has_tools_too(tmp_path: Path) -> None:
    client = TemplatedClient(
        tmp_path, LLAMA3, '{"name": "add", "parameters": {"a": 27}}<|eot_id|>', "27<|eot_id|>"
    )

    async def main() -> Sample:
        episode = Policy(client, Sampling(max_tokens=200), 7).with_tools([ADD]).episode()
        turn = await episode.generate(user("a"))
        (call,) = turn.calls
        assert (call.name, call.arguments) == ("add", {"a": 27})
        turn = await episode.generate([{"role": "tool", "tool_call_id": call.id, "content": "27"}])
        assert not turn.calls
        return episode.sample()

    sample = asyncio.run(main())
    assert sample.text == "27" and int(sample.loss_mask.sum()) > 2


def test_embedded_engine_shows_tools_and_says_how_calls_are_written(tmp_path: Path) -> None:
    make_tokenizer(QWEN3).save_pretrained(tmp_path)
    config = Qwen3Config(
        vocab_size=700, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)

    async def main(url: str) -> tuple[str, Completion]:
        async with EngineClient(url) as client:
            sampling = Sampling(max_tokens=5, chat_template={"enable_thinking": False})
            policy = Policy(client, sampling, 7).with_tools([ADD])
            history = {
                "role": "assistant",
                "content": "",
                "tool_calls": [ToolCall("abcdefghi", "add", {"a": 1}).wire],
            }
            (turn,) = await policy.generate([*user("1+1"), history, {"role": "tool", "content": "2"}])
            return await client.detokenize(turn.prompt_ids), turn

    with serving(tmp_path) as server:
        prompt, turn = asyncio.run(main(server.url))
    assert '"name": "add"' in prompt and '{"name": "add", "arguments": {"a": 1}}' in prompt
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert len(turn.token_ids) == 5 and turn.calls == ()


def test_template_that_knows_no_tools_refuses_them_before_anything_is_generated() -> None:
    policy = Policy(ScriptedClient("5."), Sampling(), 7).with_tools([ADD])
    with pytest.raises(RequestRefused, match="leaves out tools"):
        asyncio.run(policy.generate(user("a")))
