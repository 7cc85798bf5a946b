"""Convert text to token ids and back, for the embedded engine's server."""

import contextlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from rollout.engines.bodies import BadRequest
from rollout.engines.completion import whole_characters
from rollout.engines.embedded.protocol import TokenizeBody
from rollout.engines.model_dir import PathLike, WeightsError
from rollout.engines.model_facts import placeholder
from rollout.pictures import pictures_in

if TYPE_CHECKING:  # a tokenizer needs no torch
    from rollout.engines.embedded.batch import SampleInProgress

_CONTEXT_TOKENS = 6
"""Prompt tokens decoded with a completion: some tokenizers decode the first token of a text differently."""


class TextTokenizer:
    """The tokenizer of one model. Used by one thread."""

    def __init__(self, model_dir: PathLike, name: str = "") -> None:
        """Load it from `model_dir`, which messages call `name`."""
        self._name = name or os.fspath(model_dir)
        self._tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        self._placeholder: int | None = None
        with contextlib.suppress(WeightsError):  # a tokenizer alone, without the model's configuration
            self._placeholder = placeholder(Path(model_dir))
        self._token_text: dict[int, str] = {}
        self._prompt: list[int] = []
        self._skips = True
        self._context: list[int] = []
        self._before = ""

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens if `special_tokens`."""
        return self._tokenizer.encode(text, add_special_tokens=special_tokens)

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text or of chat messages. Raises BadRequest if neither or both are given, or if the
        chat template refuses them.
        """
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages")
        if body.prompt is not None:
            return self.encode(body.prompt, body.add_special_tokens is not False)
        if not self._tokenizer.chat_template:
            raise BadRequest(f"messages: the tokenizer of {self._name} has no chat template")
        pictures = len(pictures_in(body.messages))
        if pictures or self._needs_parts:
            body = body.model_copy(update={"messages": _in_parts(body.messages or [])})
        messages = [_with_arguments(message) for message in body.messages or ()]
        try:
            text = self._rendered(messages, body)
        except Exception as error:  # the template is the model's code and may raise anything
            try:  # some put a call's arguments together from texts (DeepSeek V3 and R1)
                text = self._rendered(body.messages or [], body)
            except Exception:
                raise BadRequest(f"messages: the chat template refuses them: {error}") from error
        token_ids = self.encode(text, bool(body.add_special_tokens))
        if pictures:
            self._check_places(token_ids, pictures)
        return token_ids

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the chat template, of a model that sees, leaves out a content that is no list of parts."""
        if self._placeholder is None:
            return False
        with contextlib.suppress(Exception):  # as in `tokenize`
            message = {"role": "user", "content": "words"}
            return "words" not in self._rendered([message], TokenizeBody(messages=[message]))
        return True

    def _check_places(self, token_ids: Sequence[int], pictures: int) -> None:
        """Raise BadRequest unless the tokens have a place for each of so many pictures."""
        if self._placeholder is None:
            raise BadRequest(f"messages: they show pictures, and {self._name} takes none")
        if (count := token_ids.count(self._placeholder)) != pictures:
            raise BadRequest(
                f"messages: they show {pictures} pictures, and the chat template of {self._name} gives them "
                f"{count} places; a text with the placeholder in it has one too"
            )

    def _rendered(self, messages: list[dict[str, Any]], body: TokenizeBody) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=body.tools,
            **(body.chat_template_kwargs or {}),
            tokenize=False,
            add_generation_prompt=body.add_generation_prompt,
        )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

    def completion(self, row: "SampleInProgress") -> str:
        """Return the text that a finished row adds to the whole characters of its prompt, up to what has
        ended it.
        """
        generation = row.generation
        if generation.prompt_ids is not self._prompt or generation.skip_special is not self._skips:
            self._prompt, self._skips = generation.prompt_ids, generation.skip_special
            self._set_context(self._prompt)  # the samples of a group share it
        stop = row.stop_reason
        # A token that has ended it is left out, as in vLLM, whether the tokenizer calls it special or not.
        ended_by_token = row.finish_reason == "stop" and not isinstance(stop, str)
        token_ids = row.token_ids[:-1] if ended_by_token else row.token_ids
        text = self._decode([*self._context, *token_ids])[len(self._before) :]
        return text.partition(stop)[0] if isinstance(stop, str) else text

    def _set_context(self, prompt: list[int]) -> None:
        tokens = _CONTEXT_TOKENS
        while True:
            self._context = prompt[-tokens:]
            self._before = whole_characters(self._decode(self._context))
            if self._before or tokens >= len(prompt):
                return
            tokens *= 2  # all of it may belong to characters that are not whole

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)

    def of_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        for token_id in token_ids:
            if token_id not in self._token_text:
                self._token_text[token_id] = self._tokenizer.decode([token_id])
        return [self._token_text[token_id] for token_id in token_ids]


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with lists of parts as their contents: many templates that know pictures want that."""
    return [
        message | {"content": [{"type": "text", "text": text}] if text else []}
        if isinstance(text := message.get("content"), str)
        else message
        for message in messages
    ]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as objects, which chat templates need. In the
    OpenAI API they are texts.
    """
    if not message.get("tool_calls"):
        return message
    functions = [{**call["function"]} for call in message["tool_calls"]]
    for function in functions:
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
    calls = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}
