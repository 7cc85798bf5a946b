"""Continue a conversation in tokens: find what a chat template puts after an assistant's turn."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion, ToolCall
from rollout.environments.tool_calls import MARKED, PARSERS, Tool, with_calls
from rollout.tasks.messages import Message, same_beginning


class ChatTemplate:
    """The chat template of an engine's model, used through the engine's /tokenize.

    A conversation that is rendered again from its messages differs from the one that the model saw. Templates
    drop the reasoning of earlier turns, move the system message and trim; text is tokenised differently from
    how it was generated. So only new messages are rendered, after a stand-in for the earlier ones.

    With `tools` it shows them to the model, and finds their calls as `parser` says (the setting
    rollout.tool_parser): one of PARSERS, or `auto` for the one that can read what the template itself writes.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        variables: Mapping[str, Any] | None = None,
        parser: str = "auto",
        tools: Sequence[Tool] = (),
    ) -> None:
        """`variables`: for the template (the setting rollout.chat_template)."""
        self._client = client
        self._variables = variables
        self._parser = parser
        self._tools = tools
        self._bare: dict[str, Any] = {"chat_template_kwargs": dict(variables)} if variables else {}
        self._options = {**self._bare, "tools": list(tools)} if tools else self._bare
        self._with_tools: dict[str, ChatTemplate] = {}
        self._is_shown = False
        """Whether the template is known to show the tools."""
        self._read: str | None = None
        """What reads the calls, once it is known."""
        self._reading = asyncio.Lock()
        self._seen: dict[str, list[int]] = {}  # the samples of a group often get the same message
        self._known_roles = {"system", "developer", "user", "assistant", "tool"}
        """Roles that are not misspelled, and those that the template is known to render."""

    def with_tools(self, tools: Sequence[Tool]) -> "ChatTemplate":
        """Return the template for conversations in which the model has these tools: one for equal tools."""
        key = json.dumps(tools)
        if key not in self._with_tools:
            self._with_tools[key] = ChatTemplate(
                self._client, variables=self._variables, parser=self._parser, tools=tools
            )
        return self._with_tools[key]

    async def prompt(self, messages: Sequence[Message], *, answers: bool = True) -> list[int]:
        """Token ids that begin a conversation, with the generation prompt. Raises RequestRefused. `answers`:
        whether the model goes on, and its calls must be read.
        """
        async with self._reading:
            await self._check_shown()
        if answers:
            await self._reader()
        return await self._tokenize(messages, messages)

    async def tokenize_whole(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that ends there, without the generation prompt."""
        return await self._client.tokenize_whole(messages, **self._options)

    async def read(self, turn: Completion) -> Completion:
        """Return a turn with the calls of the tools in it. Raises RequestRefused."""
        parser = await self._reader()
        if parser is None:
            return turn
        return with_calls(turn, parser, self._tools, await self._marked(turn, parser))

    async def _marked(self, turn: Completion, parser: str) -> str | None:
        """Return the text of a turn with special tokens, if calls may be between them."""
        special, ids = self._client.facts.special_tokens.ids.values(), turn.token_ids
        if parser not in MARKED:
            ids = ids[:-1] if ids and ids[-1] in special else ids  # the end is no part of a call
            if not any(token in special for token in ids):
                return None
        return await self._client.detokenize(ids)

    async def continuation(self, messages: Sequence[Message], after: Completion) -> list[int]:
        """Token ids to append to a completion and its prompt: the end of the assistant's turn unless the
        completion has it already, the new messages, the generation prompt. Raises RequestRefused.
        """
        if not messages:
            raise ValueError("there is no new message to go on with")
        try:
            suffix, nothing = await asyncio.gather(self._behind_turn(messages), self._behind_turn([]))
            if suffix == nothing:
                raise RequestRefused(
                    f"the model's chat template leaves out messages of the role {_roles(messages)}"
                )
        except RequestRefused:
            if not after.calls:
                raise
            return await self._behind_calls(messages, after)
        return suffix[_overlap(after.token_ids, suffix) if after.finish_reason == "stop" else 0 :]

    async def _behind_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that follow any words of an assistant: the common end of two conversations that
        differ in those words only. The words are digits: no tokenizer merges them with a template's text.
        """
        key = json.dumps(messages)
        if key not in self._seen:
            conversations = [
                [{"role": "user", "content": "0"}, {"role": "assistant", "content": words}, *messages]
                for words in "01"
            ]
            first, other = await asyncio.gather(*(self._tokenize(c, messages) for c in conversations))
            self._seen[key] = first[len(first) - same_beginning(first[::-1], other[::-1]) :]
        return self._seen[key]

    async def _behind_calls(self, messages: Sequence[Message], after: Completion) -> list[int]:
        """Return the tokens that follow a turn with calls, for templates that show results of tools only
        behind their calls: what comes after the token that has ended the turn, or after the one before it.
        """
        called = [*_ASKED, _calling(after.calls)]
        all_tokens, closed, begun = await asyncio.gather(
            self._tokenize([*called, *messages], messages),
            self.tokenize_whole(called),
            self._tokenize(_ASKED, _ASKED),
        )
        begin = same_beginning(begun, all_tokens)
        turn = all_tokens[begin : max(begin, same_beginning(closed, all_tokens))]
        for token in after.token_ids[:-3:-1]:
            if token in turn:
                return all_tokens[begin + len(turn) - turn[::-1].index(token) :]
        raise RequestRefused(
            "the model has ended its calls with other tokens than its chat template, which does not say what "
            f"messages of the role {_roles(messages)} are then"
        )

    async def _tokenize(self, conversation: Sequence[Message], new: Sequence[Message]) -> list[int]:
        try:
            token_ids = await self._client.tokenize(conversation, **self._options)
        except RequestRefused as error:
            raise RequestRefused(
                f"the model's chat template refuses messages of the roles {_roles(new)}: {error}"
            ) from error
        for role in {str(message.get("role")) for message in conversation} - self._known_roles:
            await self._check_role(role, conversation)
        return token_ids

    async def _check_role(self, role: str, conversation: Sequence[Message]) -> None:
        """Raise RequestRefused if the words of the role's messages change nothing in the prompt."""

        def with_words(words: str) -> list[Message]:
            return [{**m, "content": words} if m.get("role") == role else m for m in conversation]

        first, other = [await self._client.tokenize(with_words(words), **self._options) for words in "01"]
        if first == other:
            raise RequestRefused(
                f"role {role!r}: the model's chat template leaves the message out; correct the role, e.g. to "
                "user or assistant"
            )
        self._known_roles.add(role)

    async def _reader(self) -> str | None:
        """Return which of PARSERS reads the calls; None without tools. Raises RequestRefused if there is
        none, or if the template does not show tools to the model.
        """
        if not self._tools:
            return None
        async with self._reading:
            await self._check_shown()
            if self._read is None:
                self._read = self._parser if self._parser != "auto" else await self._parser_of_template()
            return self._read

    async def _check_shown(self) -> None:
        """Raise RequestRefused if the template does not show the tools to the model."""
        if not self._tools or self._is_shown:
            return
        shown, bare = await asyncio.gather(
            self._tokenize(_ASKED, _ASKED), self._client.tokenize(_ASKED, **self._bare)
        )
        if shown == bare:
            raise RequestRefused(
                "the model's chat template leaves out tools: describe them in the messages and read "
                "the calls from the text of the answer"
            )
        self._is_shown = True

    async def _parser_of_template(self) -> str:
        """Return the name of the parser that reads a call as the template writes it into the conversation."""
        template = self.with_tools([EXAMPLE_TOOL])
        call = ToolCall("abcdefghi", "look_up", {"word": "tree"})
        plain = [*_ASKED, {"role": "assistant", "content": "0"}]
        called = [*_ASKED, _calling([call])]
        bare, with_call, end = await asyncio.gather(
            template._tokenize(plain, plain), template._tokenize(called, called), template._behind_turn([])
        )
        begin = same_beginning(bare, with_call)
        written = await self._client.detokenize(
            with_call[begin : len(with_call) - same_beginning(end[::-1], with_call[::-1])]
        )
        turn = Completion([], [], [], written, "stop")
        for name in PARSERS:
            calls = with_calls(turn, name, [EXAMPLE_TOOL], written).calls
            if [(read.name, read.arguments) for read in calls] == [(call.name, call.arguments)]:
                return name
        raise RequestRefused(
            f"the model's chat template writes a tool call in none of the forms {', '.join(PARSERS)}, but as "
            f"{written[:_EXCERPT]!r}: set rollout.tool_parser, or describe the tools in the messages"
        )


_EXCERPT = 200
_ASKED: list[Message] = [{"role": "user", "content": "0"}]
EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def _calling(calls: Sequence[ToolCall]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [call.wire for call in calls]}


def _overlap(tokens: list[int], suffix: list[int]) -> int:
    """Return how many of the first tokens of `suffix` already end `tokens`."""
    longest = min(len(tokens), len(suffix))
    return next((size for size in range(longest, 0, -1) if tokens[-size:] == suffix[:size]), 0)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)
