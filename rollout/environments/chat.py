"""Continue a conversation in tokens: find what a chat template puts after an assistant's turn."""

import asyncio
import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rollout.engines.client import Completion, EngineClient, RequestRefused

Message = dict[str, Any]
"""`role`, `content`, and other fields of the model's chat template (`tool_call_id`, `name` ...)."""


class ChatTemplate:
    """The chat template of an engine's model, used through the engine's /tokenize.

    A conversation that is rendered again from its messages differs from the one that the model saw. Templates
    drop the reasoning of earlier turns, move the system message and trim; text is tokenised differently from
    how it was generated. So only new messages are rendered, after a stand-in for the earlier ones.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._seen: dict[str, list[int]] = {}  # the samples of a group often get the same message

    async def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that begin a conversation, with the generation prompt. Raises RequestRefused."""
        return await self._tokenize(messages, messages)

    async def continuation(self, messages: Sequence[Message], after: Completion) -> list[int]:
        """Token ids to append to a completion and its prompt: the end of the assistant's turn unless the
        completion has it already, the new messages, the generation prompt. Raises RequestRefused.
        """
        if not messages:
            raise ValueError("there is no new message to go on with")
        suffix, nothing = await asyncio.gather(self._behind_turn(messages), self._behind_turn([]))
        if suffix == nothing:
            raise RequestRefused(
                f"the model's chat template leaves out messages of the role {_roles(messages)}"
            )
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
            one, other = await asyncio.gather(*(self._tokenize(c, messages) for c in conversations))
            pairs = zip(reversed(one), reversed(other), strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._seen[key] = one[len(one) - common :]
        return self._seen[key]

    async def _tokenize(self, conversation: Sequence[Message], new: Sequence[Message]) -> list[int]:
        try:
            return await self._client.tokenize(conversation)
        except RequestRefused as error:
            raise RequestRefused(
                f"the model's chat template refuses messages of the roles {_roles(new)}: {error}"
            ) from error


def _overlap(tokens: list[int], suffix: list[int]) -> int:
    """Return how many of the first tokens of `suffix` already end `tokens`."""
    longest = min(len(tokens), len(suffix))
    return next((size for size in range(longest, 0, -1) if tokens[-size:] == suffix[:size]), 0)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)
