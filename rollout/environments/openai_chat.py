"""Chat completions of the OpenAI API: check a request, build an answer. Pure."""

import json
import time
import uuid
from typing import Any

from pydantic import Field, StrictBool, StrictInt

from rollout.engines.bodies import BadRequest, GenerationBody
from rollout.engines.client import Completion
from rollout.environments.chat import Message

IGNORED = (
    "temperature",
    "top_p",
    "seed",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Sampling that agents often ask for; it is ignored, because the run's sampling holds."""

_AS_TEXT = "describe the tools in the messages and read the calls from the text of the answer"
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "ask once for each"),
    "tools": (([],), _AS_TEXT),
    "functions": (([],), _AS_TEXT),
    "tool_choice": (("none", "auto"), _AS_TEXT),
    "function_call": (("none", "auto"), _AS_TEXT),
    "response_format": (({"type": "text"},), "the answer is text"),
    "logprobs": ((False,), "the samples of the session hold them"),
    "top_logprobs": ((0,), "the samples of the session hold the chosen tokens' logprobs"),
    "logit_bias": (({},), "the sampling is the run's"),
    "chat_template": ((), "the model's own is used"),
    "chat_template_kwargs": (({},), "the model's chat template is used with its defaults"),
    "modalities": ((["text"],), "the answer is text"),
    "audio": ((), "the answer is text"),
}
"""Fields that are not supported: the values (beside null) that change nothing, and a hint."""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: StrictInt | None = Field(None, ge=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that the answer may have."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


def check_chat(body: ChatBody) -> list[Message]:
    """Return the messages, each with its content as one string and without empty fields. Raises BadRequest if
    the request needs something that is not supported.
    """
    for name, (neutral, hint) in _UNSUPPORTED.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: not supported here; {hint}")
    if "" in body.stop_strings:
        raise BadRequest("stop: a stop string must not be empty")
    return [_message(number, message) for number, message in enumerate(body.messages)]


def _message(number: int, message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages.{number}.role: must be a string")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest(f"messages.{number}.content: only parts of the type text are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise BadRequest(f"messages.{number}.content: must be a string or parts of the type text")
    filled = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**filled, "content": content or ""}


def answer_body(model: str, turn: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": turn.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish_reason}
    return {**_head(model, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def answer_events(model: str, turn: Completion, *, usage: bool) -> bytes:
    """Return the answer as server-sent events: the text, the end, and the token counts if asked for."""
    head = _head(model, "chat.completion.chunk")
    deltas = [({"role": "assistant", "content": turn.text}, None), ({}, turn.finish_reason)]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    if usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": _usage(turn)})
    lines = [json.dumps({**head, **chunk}) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(turn: Completion) -> dict[str, int]:
    prompt, completion = len(turn.prompt_ids), len(turn.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
