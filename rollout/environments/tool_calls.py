"""Find the tool calls in a model's text, as the family of the model writes them. Pure."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.engines.completion import Completion, ToolCall
from rollout.environments.call_values import Call, Found, NoCall, argument_of, call_of, read_json
from rollout.environments.marked_calls import gemma4, glm, harmony, lfm2

Tool = Mapping[str, Any]
"""As in the OpenAI API: {"type": "function", "function": {"name", "description", "parameters"}}."""
MISTRAL_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def with_calls(turn: Completion, parser: str, tools: Sequence[Tool], marked: str | None = None) -> Completion:
    """Return a turn with the calls in its text, and with the text before them as its `content`. `marked`: the
    text with special tokens, for the parsers of MARKED.

    There are none if the turn was cut, if one of them is malformed, or if it names none of `tools`. A call in
    the reasoning of a model (before `</think>`) is none.
    """
    if turn.finish_reason != "stop":
        return turn
    text = turn.text if marked is None else marked
    end = _REASONING_ENDS.get(parser, "</think>")
    begin = text.rfind(end) + len(end) if end and end in text else 0
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    try:
        before, calls = PARSERS[parser](text[begin:], schemas)
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
    return replace(turn, calls=made, content=(text[:begin] + before).rstrip())


def _id(text: str) -> str:
    """Return nine letters and digits, the only form that all chat templates accept (Mistral's)."""
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def _hermes(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    first, *parts = text.split(_OPEN)
    calls: list[Call] = []
    for part in parts:
        value, end = read_json(part)
        if not part[end:].lstrip().startswith(_CLOSE):
            raise NoCall
        calls.append(call_of(value))
    return first, calls


def _qwen3_coder(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder,
    Qwen3.5 and later.
    """
    first, *parts = text.split(_OPEN)
    calls: list[Call] = []
    for part in parts:
        body, closed, _ = part.partition(_CLOSE)
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if match is None or not closed:
            raise NoCall
        calls.append(Call(match[1], _parameters(match[2], schemas.get(match[1]))))
    return first, calls


def _parameters(body: str, schema: Any) -> dict[str, Any]:
    before, *parts = body.split("<parameter=")
    arguments: dict[str, Any] = {}
    for part in parts:
        name, opened, rest = part.partition(">")
        value, closed, behind = rest.partition("</parameter>")
        if not opened or not closed or behind.strip():
            raise NoCall
        arguments[name] = argument_of(value.removeprefix("\n").removesuffix("\n"), name, schema)
    if before.strip():
        raise NoCall
    return arguments


def _llama3_json(text: str, schemas: Mapping[str, Any]) -> Found:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, and nothing else: Llama 3."""
    rest = text.strip().removeprefix(_PYTHON_TAG)
    calls: list[Call] = []
    while rest:
        value, end = read_json(rest)
        calls.append(call_of(value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return "", calls


def _mistral(text: str, schemas: Mapping[str, Any]) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each `[TOOL_CALLS]NAME[ARGS]{...}`:
    Mistral. The marks may be missing: engines leave special tokens out of the text.
    """
    before, mark, rest = text.partition(MISTRAL_MARK)
    rest = (rest if mark else text).strip()
    calls: list[Call] = []
    if rest.startswith("["):
        values, end = read_json(rest)
        if rest[end:].strip() or not isinstance(values, list):
            raise NoCall
        calls = [call_of(value) for value in values]
        rest = ""
    while rest:
        match = re.match(r"([\w.-]+)(?:\[ARGS\])?(?=\{)", rest)
        if match is None:
            raise NoCall
        arguments, end = read_json(rest[match.end() :])
        calls.append(Call(match[1], arguments))
        rest = rest[match.end() + end :].strip().removeprefix(MISTRAL_MARK)
    return before if mark else "", calls


PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Found]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "glm45": glm,
    "openai": harmony,
    "gemma4": gemma4,
    "lfm2": lfm2,
}
"""By the names that vLLM has for them (the setting rollout.tool_parser)."""
MARKED = frozenset({"glm45", "openai", "gemma4", "lfm2"})
"""Parsers that look for tokens which engines leave out of a text."""
_REASONING_ENDS = {"openai": None, "gemma4": "<channel|>"}
