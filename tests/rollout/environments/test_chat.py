"""Continuing a conversation in tokens, under templates that behave as those of the model families do."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollout.engines.answers import EngineFacts, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.engines.special_tokens import SpecialTokens
from rollout.environments.chat import ChatTemplate
from tests.rollout.templated import make_tokenizer

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) and m.role != 'tool' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # the reasoning of all but the last assistant's turn is dropped, the last gets an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # the system message moves to the last user's
    ALTERNATE + "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{% if loop.last %}Be helpful.\n\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('call IDs must have length 9') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    ALTERNATE + "<bos>{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


TEXTS = [QWEN25, MISTRAL, PLAIN, "User: 27+58=\n\nAssistant: 85\n\nUser: 0\n\nAssistant:"]


class Client(EngineClient):
    """Its tokenizer is here; a template that raises is answered as an engine does, with 400."""

    def __init__(self, template: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.tokenizer = make_tokenizer(template, *TEXTS)
        self.calls = 0

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        self.calls += 1
        assert not isinstance(text, str)
        try:
            rendered = self.tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja's
            raise RequestRefused(f"400: {error}") from error
        return self.tokenizer.encode(str(rendered), add_special_tokens=False)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def go_on(client: Client, messages: list[dict[str, Any]], said: str, finish_reason: str = "stop") -> str:
    """What is appended after `said`, as text."""
    said_before = Completion([1, 2], client.ids(said), [], said, finish_reason)
    appended = asyncio.run(ChatTemplate(client).continuation(messages, said_before))
    return str(client.tokenizer.decode(appended))


USER = [{"role": "user", "content": "No. Again?"}]
TOOL = [{"role": "tool", "content": "85", "tool_call_id": "abcdefghi"}]
END_IM, END_LLAMA, END_GEMMA = "<|im_end|>", "<|eot_id|>", "<end_of_turn>"


@pytest.mark.parametrize(
    ("template", "messages", "end", "rest"),
    [
        (QWEN25, USER, END_IM, "\n<|im_start|>user\nNo. Again?<|im_end|>\n<|im_start|>assistant\n"),
        (
            *(QWEN25, TOOL * 2, END_IM),
            "\n<|im_start|>user"
            + 2 * "\n<tool_response>\n85\n</tool_response>"
            + "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (QWEN3, USER, END_IM, "\n<|im_start|>user\nNo. Again?<|im_end|>\n<|im_start|>assistant\n"),
        (
            *(LLAMA3, USER, END_LLAMA),
            "<|start_header_id|>user<|end_header_id|>\n\nNo. Again?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            *(LLAMA3, TOOL, END_LLAMA),
            "<|start_header_id|>ipython<|end_header_id|>\n\n85<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (MISTRAL, USER, "</s>", "[INST]Be helpful.\n\nNo. Again?[/INST]"),
        (MISTRAL, TOOL, "</s>", "[TOOL_RESULTS]85[/TOOL_RESULTS]"),
        (
            *(GEMMA, USER, END_GEMMA),
            "\n<start_of_turn>user\nNo. Again?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (PHI3, USER, "<|end|>", "\n<|user|>\nNo. Again?<|end|>\n<|assistant|>\n"),
    ],
)
def test_new_messages_are_rendered_alone_and_the_turn_is_closed_once(
    template: str, messages: list[dict[str, Any]], end: str, rest: str
) -> None:
    client = Client(template)
    assert go_on(client, messages, f"<think>\n2+2\n</think>\n\n4{end}") == rest
    assert go_on(client, messages, "<think>\n2+2 is", "length") == end + rest
    assert go_on(client, messages, "4", "stop") == end + rest  # by a stop string


def test_turn_that_ended_at_a_stop_string_of_several_tokens_is_not_closed_again() -> None:
    client = Client(PLAIN)
    assert go_on(client, USER, " 85\n\nUser:") == " No. Again?\n\nAssistant:"
    assert go_on(client, USER, " 85", "length") == "\n\nUser: No. Again?\n\nAssistant:"


def test_cut_turn_that_looks_like_the_end_of_one_is_closed_all_the_same() -> None:
    assert go_on(Client(PLAIN), USER, " 85\n\n", "length").startswith("\n\nUser:")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (GEMMA, USER * 2, "refuses messages of the roles user, user: .*must alternate"),
        (MISTRAL, [{"role": "tool", "content": "85"}], "refuses messages of the roles tool: .*length 9"),
        (PHI3, TOOL, "leaves out messages of the role tool"),
    ],
)
def test_messages_that_the_template_cannot_render_are_refused_in_one_line(
    template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=f"the model's chat template {reason}") as refused:
        go_on(Client(template), messages, "4")
    assert "\n" not in str(refused.value)


def test_no_message_is_no_continuation() -> None:
    with pytest.raises(ValueError, match="no new message"):
        go_on(Client(QWEN25), [], "4")


def test_message_that_comes_again_is_not_rendered_again() -> None:
    client = Client(QWEN25)
    template = ChatTemplate(client)

    async def main() -> None:
        for _ in range(3):
            await template.continuation(USER, Completion([1], [2], [0.0], "", "stop"))

    asyncio.run(main())
    assert client.calls == 4  # two stand-ins, with the message and without


@pytest.mark.parametrize("template", [QWEN25, LLAMA3, GEMMA, PHI3])
@pytest.mark.parametrize("change", [str, str.strip, lambda text: f"7{text}"])
def test_continued_tokens_are_those_of_the_whole_conversation_where_the_template_forgets_nothing(
    template: str, change: Callable[[str], str]
) -> None:
    client = Client(template)
    first = [{"role": "user", "content": "27+58="}]
    new = [{"role": "user", "content": change("No. Again?")}]

    async def main() -> None:
        prompt = await client.tokenize(first)
        whole = await client.tokenize([*first, {"role": "assistant", "content": "The sum is 85"}, *new])
        said = Completion(prompt, client.ids("The sum is 85"), [], "", "length")
        appended = await ChatTemplate(client).continuation(new, said)
        assert prompt + said.token_ids + appended == whole

    asyncio.run(main())


def test_calls_are_read_between_marks_that_are_special_tokens() -> None:
    """The text of a turn has none of them."""
    pieces = [
        "",
        "<tool_call>",
        '{"name": "look_up", "arguments": {"word": "tree"}}',
        "</tool_call>",
        "<end>",
    ]

    class Marked(EngineClient):
        async def tokenize(self, text: Any, **template: Any) -> list[int]:
            return [9] if "tools" in template else [8]

        async def detokenize(self, token_ids: Sequence[int]) -> str:
            return "".join(pieces[token] for token in token_ids)

    turn = Completion([0], [1, 2, 3, 4], [-1.0] * 4, pieces[2], "stop")
    tool = {"type": "function", "function": {"name": "look_up"}}
    special_tokens = SpecialTokens({"<tool_call>": 1, "</tool_call>": 3, "<end>": 4})
    client = Marked("http://127.0.0.1:1", facts=EngineFacts(special_tokens=special_tokens))
    template = ChatTemplate(client, parser="hermes", tools=[tool])
    (call,) = asyncio.run(template.read(turn)).calls
    assert (call.name, call.arguments) == ("look_up", {"word": "tree"})
