"""Chat completions of the OpenAI API: check a request, build an answer. Pure."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from rollout.engines.bodies import BadRequest, GenerationBody
from rollout.engines.completion import Completion
from rollout.environments.tool_calls import Tool
from rollout.tasks.messages import Message, checked_message

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

_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools"),
    "tool_choice": (("none", "auto"), "a call that is forced is not sampled by the policy; use auto"),
    "parallel_tool_calls": ((True,), "the model may call several tools at once; use the calls you want"),
    "logit_bias": (({},), "the sampling is the run's"),
    "chat_template": ((), "the model's own is used"),
    "chat_template_kwargs": (({},), "set rollout.chat_template for the run"),
    "modalities": ((["text"],), "the answer is text"),
    "audio": ((), "the answer is text"),
}
"""Fields that are not supported: the values (beside null) that change nothing, and a hint."""


class FunctionBody(BaseModel):
    """A function that the model may call; `strict` and other fields are ignored."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(BaseModel):
    """A tool of the request."""

    type: Literal["function"]
    function: FunctionBody


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: StrictInt | None = Field(None, ge=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    tools: list[ToolBody] | None = None
    tool_choice: Any = None
    n: StrictInt | None = Field(None, ge=1, le=128)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that the answer may have."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tool_list(self) -> list[Tool]:
        """The tools, as chat templates get them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def form(self) -> dict[str, Any] | None:
        """The form that the answer must have, if it is not any text."""
        return None if (self.response_format or {}).get("type") == "text" else self.response_format

    @property
    def more(self) -> dict[str, Any]:
        """What the engine is asked beside a completion."""
        logprobs = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return logprobs | ({"response_format": self.form} if self.form else {})

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


def check_chat(body: ChatBody) -> list[Message]:
    """Return the messages without empty fields, each with its content as one string, or as parts if it shows
    pictures, which are data URIs. Raises BadRequest if the request needs something that is not supported.
    """
    for name, (neutral, hint) in _UNSUPPORTED.items():
        value = body.tool_choice if name == "tool_choice" else (body.model_extra or {}).get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: not supported here; {hint}")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: needs logprobs=true")
    if body.form is not None:
        _check_form(body.form, has_tools=bool(body.tools))
    if "" in body.stop_strings:
        raise BadRequest("stop: a stop string must not be empty")
    return [_checked(number, message) for number, message in enumerate(body.messages)]


def _check_form(form: Mapping[str, Any], *, has_tools: bool) -> None:
    schema = form.get("json_schema")
    if form.get("type") not in ("json_object", "json_schema"):
        raise BadRequest("response_format.type: must be text, json_object or json_schema")
    if form["type"] == "json_schema" and not (
        isinstance(schema, dict) and isinstance(schema.get("schema"), dict)
    ):
        raise BadRequest("response_format.json_schema: must have a `schema`, a JSON schema as an object")
    if has_tools:
        raise BadRequest("response_format: not supported beside tools; no call has that form")


def _checked(number: int, message: Message) -> Message:
    """Return a message in one form. Raises BadRequest."""
    try:
        checked = checked_message(message, take=_data_uri)
        for call in message.get("tool_calls") or ():
            if "id" not in call or "arguments" not in call.get("function", ()):
                raise ValueError("tool_calls: must be a list of calls, each with `id` and `arguments`")
    except ValueError as error:
        raise BadRequest(f"messages.{number}.{error}") from error
    return checked


def _data_uri(value: Any) -> str:
    """Return the data URI of a picture: an agent names no file of this machine, and nothing is fetched."""
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError(f"image_url: must be data:image/...;base64,..., got {url!r:.60}")
    return url


def reply_of(turn: Completion) -> Message:
    """Return the message that an agent gets."""
    message: Message = {"role": "assistant", "content": turn.text, "refusal": None}
    if turn.calls:
        message |= {"content": turn.content or None, "tool_calls": [call.wire for call in turn.calls]}
    return message


def _reason(turn: Completion) -> str:
    return "tool_calls" if turn.calls else turn.finish_reason


def answer_body(body: ChatBody, model: str, turns: Sequence[Completion]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": reply_of(turn),
            "logprobs": _logprobs(body, turn),
            "finish_reason": _reason(turn),
        }
        for index, turn in enumerate(turns)
    ]
    return {**_head(model, "chat.completion"), "choices": choices, "usage": _usage(turns)}


def answer_events(body: ChatBody, model: str, turns: Sequence[Completion]) -> bytes:
    """Return the answer as server-sent events: for each choice the text, the calls and the end, then the
    token counts if asked for.
    """
    head = _head(model, "chat.completion.chunk")
    chunks: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        message = reply_of(turn)
        beginning = {"role": "assistant", "content": message["content"]}
        if turn.calls:
            beginning["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        for delta, logprobs, reason in (
            (beginning, _logprobs(body, turn), None),
            ({}, None, _reason(turn)),
        ):
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            chunks.append({"choices": [choice]})
    if body.wants_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": _usage(turns)})
    lines = [json.dumps({**head, **chunk}) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def _logprobs(body: ChatBody, turn: Completion) -> dict[str, Any] | None:
    """Return the logprobs of a turn's tokens, and of the likeliest ones there, in the distribution that they
    were sampled from.
    """
    if not body.logprobs:
        return None
    content: list[dict[str, Any]] = []
    for (token, likely), logprob in zip(turn.likely, turn.logprobs, strict=True):
        best = sorted(likely.items(), key=lambda entry: -entry[1])[: body.top_logprobs or 0]
        content.append({**_token(token, logprob), "top_logprobs": [_token(*entry) for entry in best]})
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(turns: Sequence[Completion]) -> dict[str, int]:
    prompt, completion = len(turns[0].prompt_ids), sum(len(turn.token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
