"""Find the tool calls in a model's text, as the family of the model writes them. Pure."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from rollout.engines.client import Completion, ToolCall

Tool = Mapping[str, Any]
"""As in the OpenAI API: {"type": "function", "function": {"name", "description", "parameters"}}."""
MISTRAL_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class _Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """If the model has written one."""


class _NoCall(ValueError):
    """The text is no call."""


_Found = tuple[int, list[_Call]]
"""Where the first call begins, and the calls."""


def with_calls(turn: Completion, parser: str, tools: Sequence[Tool]) -> Completion:
    """Return a turn with the calls in its text, and with the text before them as its `content`.

    There are none if the turn was cut, if one of them is malformed, or if it names none of `tools`. A call in
    the reasoning of a model (before `</think>`) is none.
    """
    if turn.finish_reason != "stop":
        return turn
    begin = turn.text.rfind("</think>") + len("</think>") if "</think>" in turn.text else 0
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    try:
        length, calls = PARSERS[parser](turn.text[begin:], schemas)
        json.dumps([call.arguments for call in calls], allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError):  # RecursionError: of JSON that is nested too deeply
        return turn
    if not calls or any(call.name not in schemas for call in calls):
        return turn
    seed = hashlib.sha256(json.dumps([turn.prompt_ids, turn.token_ids]).encode()).hexdigest()
    ids = [call.id or _id(f"{seed}/{number}") for number, call in enumerate(calls)]
    if len(set(ids)) < len(ids):
        return turn
    made = [ToolCall(id, call.name, call.arguments) for id, call in zip(ids, calls, strict=True)]
    return replace(turn, calls=made, content=turn.text[: begin + length].rstrip())


def _id(text: str) -> str:
    """Return nine letters and digits, the only form that all chat templates accept (Mistral's)."""
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def _hermes(text: str, schemas: Mapping[str, Any]) -> _Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    first, *parts = text.split(_OPEN)
    calls: list[_Call] = []
    for part in parts:
        value, end = _json(part)
        if not part[end:].lstrip().startswith(_CLOSE):
            raise _NoCall
        calls.append(_call(value))
    return len(first), calls


def _qwen3_coder(text: str, schemas: Mapping[str, Any]) -> _Found:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder,
    Qwen3.5 and later.
    """
    first, *parts = text.split(_OPEN)
    calls: list[_Call] = []
    for part in parts:
        body, closed, _ = part.partition(_CLOSE)
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if match is None or not closed:
            raise _NoCall
        properties = _properties(schemas.get(match[1]))
        calls.append(_Call(match[1], _parameters(match[2], properties)))
    return len(first), calls


def _parameters(body: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    before, *parts = body.split("<parameter=")
    arguments: dict[str, Any] = {}
    for part in parts:
        name, opened, rest = part.partition(">")
        value, closed, behind = rest.partition("</parameter>")
        if not opened or not closed or behind.strip():
            raise _NoCall
        value = value.removeprefix("\n").removesuffix("\n")
        schema = properties.get(name)
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        arguments[name] = value if is_text else _value(value)
    if before.strip():
        raise _NoCall
    return arguments


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str) -> Any:
    """Return what JSON makes of a value that no schema calls a text; else the text."""
    try:
        value, end = _json(text)
    except (ValueError, RecursionError):
        return text
    return text if text[end:].strip() else value


def _llama3_json(text: str, schemas: Mapping[str, Any]) -> _Found:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, and nothing else: Llama 3."""
    rest = text.strip().removeprefix(_PYTHON_TAG)
    calls: list[_Call] = []
    while rest:
        value, end = _json(rest)
        calls.append(_call(value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return 0, calls


def _mistral(text: str, schemas: Mapping[str, Any]) -> _Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each `[TOOL_CALLS]NAME[ARGS]{...}`:
    Mistral. The marks may be missing: engines leave special tokens out of the text.
    """
    before, mark, rest = text.partition(MISTRAL_MARK)
    rest = (rest if mark else text).strip()
    calls: list[_Call] = []
    if rest.startswith("["):
        values, end = _json(rest)
        if rest[end:].strip() or not isinstance(values, list):
            raise _NoCall
        calls = [_call(value) for value in values]
        rest = ""
    while rest:
        match = re.match(r"([\w.-]+)(?:\[ARGS\])?(?=\{)", rest)
        if match is None:
            raise _NoCall
        arguments, end = _json(rest[match.end() :])
        calls.append(_Call(match[1], arguments))
        rest = rest[match.end() + end :].strip().removeprefix(MISTRAL_MARK)
    return len(before) if mark else 0, calls


def _call(value: Any) -> _Call:
    if not isinstance(value, dict):
        raise _NoCall
    arguments = value.get("arguments", value.get("parameters"))
    name, id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _NoCall
    is_id = isinstance(id, str) and re.fullmatch("[a-zA-Z0-9]{9}", id)
    return _Call(name, arguments, id if is_id else None)


def _json(text: str) -> tuple[Any, int]:
    """Return the JSON value that a text begins with, and where it ends. Raises ValueError, also for NaN."""
    begin = len(text) - len(text.lstrip())
    return _DECODER.raw_decode(text, begin)


def _refuse(constant: str) -> NoReturn:
    raise _NoCall(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
PARSERS: dict[str, Callable[[str, Mapping[str, Any]], _Found]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
"""By the names that vLLM has for them (the setting rollout.tool_parser)."""
