"""Tools: what the templates of model families show, the calls that are read from the text, and the tokens."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from rollout.engines.completion import Completion
from rollout.environments.tool_calls import PARSERS, with_calls
from tests.rollout.environments.tool_agent import ADD, NOTE, QWEN_CALL, ask, result, with_client
from tests.rollout.scripted import user
from tests.rollout.templated import (
    GEMMA4,
    GLM45,
    HARMONY,
    LFM2,
    LLAMA3,
    MISTRAL3,
    MISTRAL11,
    QWEN3,
    QWEN35,
    TemplatedClient,
)

IM_NEXT = "\n<|im_start|>user\n<tool_response>\n85\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
XML_CALL = (
    "Sum.\n</think>\n\nI add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n27\n</parameter>\n"
    "<parameter=b>\n58\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>27</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>58</arg_value>\n</tool_call>"
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 27, "b": 58}'
)
FAMILIES = {
    "qwen3": (QWEN3, QWEN_CALL, "<|im_end|>", IM_NEXT),
    "qwen3.5": (QWEN35, XML_CALL, "<|im_end|>", IM_NEXT + "<think>\n"),
    "llama3": (
        *(LLAMA3, '{"name": "add", "parameters": {"a": 27, "b": 58}}', "<|eot_id|>"),
        "<|start_header_id|>ipython<|end_header_id|>\n\n85<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral v3": (
        *(
            MISTRAL3,
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 27, "b": 58}, "id": "abc123DEF"}]',
            "</s>",
        ),
        '[TOOL_RESULTS]{"content": 85, "call_id": "abc123DEF"}[/TOOL_RESULTS]',
    ),
    "mistral v11": (
        *(MISTRAL11, '[TOOL_CALLS]add[ARGS]{"a": 27, "b": 58}', "</s>"),
        '[TOOL_RESULTS]{"content": 85, "call_id": "ID"}[/TOOL_RESULTS]',
    ),
    "glm": (
        *(GLM45, "\n<think>Sum.</think>\n" + GLM_CALL, "<|observation|>"),
        "\n<tool_response>\n85\n</tool_response><|assistant|>",
    ),
    "gpt-oss": (
        *(HARMONY, HARMONY_CALL, "<|call|>"),
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"85"<|end|><|start|>assistant',
    ),
    "gemma4": (
        *(GEMMA4, "<|channel>thought\nSum.<channel|><|tool_call>call:add{a:27,b:58}<tool_call|>"),
        *("<|tool_response>", 'response:add{value:<|"|>85<|"|>}<tool_response|>'),
    ),
    "gemma4, turn ended": (
        *(GEMMA4, "<|tool_call>call:add{b:58,a:27}<tool_call|>"),
        *("<turn|>", '<|tool_response>response:add{value:<|"|>85<|"|>}<tool_response|>'),
    ),
    "lfm2": (
        *(LFM2, "I add.<|tool_call_start|>[add(a=27, b=58)]<|tool_call_end|>", "<|im_end|>"),
        "\n<|im_start|>tool\n85<|im_end|>\n<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_call_and_its_result_continue_in_the_tokens_that_were_sampled(family: str, tmp_path: Path) -> None:
    template, call, end, rest = FAMILIES[family]
    client = TemplatedClient(tmp_path, template, call + end, f"It is 85.{end}")

    async def play(agent: openai.AsyncOpenAI) -> list[Any]:
        first = await ask(agent, user("27+58="))
        messages = [*user("27+58="), first.message, result(first.message.tool_calls[0])]
        return [first, await ask(agent, messages)]

    (first, last), (sample,) = with_client(client, play)
    (made,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and made.type == "function" and len(made.id) == 9
    assert made.function.name == "add" and json.loads(made.function.arguments) == {"a": 27, "b": 58}
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("It is 85.", None, "stop")
    whole = str(client.tokenizer.decode(sample.token_ids))
    assert '"add"' in whole.partition(call)[0].replace("'", '"')  # the model has seen the tool
    assert whole.endswith(call + end + rest.replace("ID", made.id) + f"It is 85.{end}")
    trained = [int(t) for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert trained == client.tokenizer.encode(call + end + f"It is 85.{end}", add_special_tokens=False)
    assert [turn.role for turn in sample.turns] == ["user", "assistant", "tool", "assistant"]


def test_content_beside_a_call_is_what_precedes_it_after_the_reasoning_too(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3, QWEN_CALL + "<|im_end|>")
    first, _ = with_client(client, lambda agent: ask(agent, user("a")))
    assert first.message.content == "<think>\nSum.\n</think>\n\nI add."


@pytest.mark.parametrize("lead", ["", "```json\n", "<|python_tag|>", "["])
def test_content_beside_a_call_without_marks_is_the_words_before_it(lead: str) -> None:
    text = f'I add.\n{lead}{{"name": "add", "parameters": {{"a": 1}}}}'
    turn = with_calls(Completion([1], [2], [0.0], text, "stop"), "llama3_json", [ADD])
    assert [call.name for call in turn.calls] == ["add"] and turn.content == "I add."


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', [("add", {})]),
        (
            "hermes",
            'a<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"t": "</tool_call>"}, "name": "note"}</tool_call>.',
            [("add", {"a": 1}), ("note", {"t": "</tool_call>"})],
        ),
        (
            "hermes",
            '<think><tool_call>{"name": "add"</think><tool_call>{"name": "add", "arguments": {}}</tool_call>',
            [("add", {})],
        ),
        ("hermes", '<think><tool_call>{"name": "add", "arguments": {}}</tool_call></think>No.', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', []),
        ("hermes", "<tool_call>" + '{"a":' * 100_000, []),
        ("hermes", "<tool_call>" + "9" * 5000 + "</tool_call>", []),
        ("hermes", "<tool_call>", []),
        ("hermes", "</tool_call>", []),
        ("hermes", "", []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', [("add", {})]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}}; {"name": "note", "parameters": {}}',
            [("add", {}), ("note", {})],
        ),
        ("llama3_json", 'I call {"name": "add", "parameters": {}} now.', [("add", {})]),
        (
            "llama3_json",
            'Both:\n```json\n[{"name": "add", "parameters": {}}, {"name": "note", "parameters": {}}]\n```',
            [("add", {}), ("note", {})],
        ),
        ("llama3_json", 'He is {"name": "Ada"}: {"name": "note", "parameters": {}}', [("note", {})]),
        ("llama3_json", '<think>{"name": "add", "parameters": {}}</think>No.', []),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}}</think>So {"name": "note", "parameters": {"t": "</think>"}}',
            [("note", {"t": "</think>"})],
        ),
        ("llama3_json", '{"name":' * 100_000, []),
        ("llama3_json", '{"name": "Ada", "parameters": {}}', []),
        ("llama3_json", '{"name": ["add"]}', []),
        ("llama3_json", '{"answer": 85}', []),
        ("llama3_json", "85", []),
        ("llama3_json", "", []),
        ("mistral", '[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
        ("mistral", 'So. [TOOL_CALLS] [{"name": "add", "arguments": {}}]', [("add", {})]),
        ("mistral", 'add{"a": 1}note{}', [("add", {"a": 1}), ("note", {})]),
        ("mistral", "[1, 2]", []),
        ("mistral", "[]", []),
        ("mistral", "[TOOL_CALLS]", []),
        ("mistral", "add [1]", []),
        ("mistral", "It is 85.", []),
        (
            "mistral",
            '[{"name": "add", "arguments": {}, "id": "abcabcabc"}, {"name": "add", "arguments": {}, "id": '
            '"abcabcabc"}]',
            [],
        ),
        ("qwen3_coder", "<tool_call><function=note></function></tool_call>", [("note", {})]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=unit>\n7\n</parameter>\n<parameter=a>\n7\n</parameter>\n"
            "<parameter=c>\n[1,\n2]\n</parameter>\n<parameter=d>\nno\n JSON\n</parameter>\n"
            "</function>\n</tool_call>",
            [("add", {"unit": "7", "a": 7, "c": [1, 2], "d": "no\n JSON"})],
        ),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>7</function></tool_call>", []),
        ("qwen3_coder", "<tool_call><function=add>7</function></tool_call>", []),
        ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', []),
    ],
)
def test_calls_are_read_whole_or_not_at_all(parser: str, text: str, calls: list[Any]) -> None:
    turn = with_calls(Completion([1], [2], [0.0], text, "stop"), parser, [ADD, NOTE])
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert turn.text == text and (turn.content is None) == (not calls)
    for name in PARSERS:  # none fails on what is written for another
        with_calls(turn, name, [ADD, NOTE])
    assert not with_calls(Completion([1], [2], [0.0], text, "length"), parser, [ADD, NOTE]).calls


def test_equal_calls_have_ids_of_their_own_and_the_same_in_each_run() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2

    def ids(prompt: int) -> list[str]:
        turn = with_calls(Completion([prompt], [2], [0.0], text, "stop"), "hermes", [ADD])
        return [call.id for call in turn.calls]

    assert len({*ids(1), *ids(2)}) == 4 and ids(1) == ids(1)


def test_malformed_call_is_the_text_of_the_answer_and_can_be_answered(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 27,}}\n</tool_call>'
    client = TemplatedClient(tmp_path, QWEN3, broken + "<|im_end|>", "85<|im_end|>")

    async def play(agent: openai.AsyncOpenAI) -> Any:
        first = await ask(agent, user("a"))
        await ask(agent, [*user("a"), first.message, *user("That is not JSON.")])
        return first

    first, (sample,) = with_client(client, play)
    assert (first.message.content, first.message.tool_calls, first.finish_reason) == (broken, None, "stop")
    assert int(sample.loss_mask.sum()) == len(client.tokenizer.encode(broken + "<|im_end|>85<|im_end|>"))


def test_stream_holds_the_calls_as_clients_put_them_together(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, MISTRAL11, 'add{"a": 1}note{}</s>')

    async def play(agent: openai.AsyncOpenAI) -> Any:
        completions: Any = agent.chat.completions
        # The client's helper takes no others.
        strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (ADD, NOTE)]
        async with completions.stream(
            model="policy", messages=[{"role": "user", "content": "a"}], tools=strict
        ) as stream:
            return await stream.get_final_completion()

    final, _ = with_client(client, play)
    (choice,) = final.choices
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("add", '{"a": 1}'),
        ("note", "{}"),
    ]
    assert choice.finish_reason == "tool_calls" and not choice.message.content


def test_agent_may_write_the_arguments_of_a_call_in_another_form(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3, QWEN_CALL + "<|im_end|>", "85<|im_end|>")

    async def play(agent: openai.AsyncOpenAI) -> None:
        said = (await ask(agent, user("a"))).message.model_dump()
        call = said["tool_calls"][0]
        call["function"]["arguments"] = '{"a":27,"b":58}'
        said = {"role": "assistant", "content": said["content"], "tool_calls": [{**call, "index": 0}]}
        await ask(agent, [*user("a"), said, {"role": "tool", "tool_call_id": call["id"], "content": "85"}])

    _, samples = with_client(client, play)
    assert len(samples) == 1


def test_without_a_choice_to_call_the_text_is_the_answer(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    client = TemplatedClient(tmp_path, QWEN3, text + "<|im_end|>")
    first, _ = with_client(client, lambda agent: ask(agent, user("a"), tool_choice="none"))
    assert (first.message.content, first.message.tool_calls) == (text, None)


def test_cut_call_is_the_text_of_the_answer(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3, QWEN_CALL + "<|im_end|>")
    first, _ = with_client(client, lambda agent: ask(agent, user("a"), max_tokens=9))
    assert first.finish_reason == "length" and first.message.tool_calls is None
