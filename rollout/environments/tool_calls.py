"""Find the tool calls in a model's text, as the family of the model writes them. Pure."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.engines.completion import Completion, ToolCall
from rollout.environments.call_schema import argument_of, fitted
from rollout.environments.call_values import (
    Found,
    NoCall,
    ParsedCall,
    call_of,
    calls_behind,
    end_behind,
    read_json,
)
from rollout.environments.marked_calls import gemma4, glm, harmony, lfm2

Tool = Mapping[str, Any]
"""A tool as in the OpenAI API: {"type": "function", "function": {"name", "description", "parameters"}}."""
MISTRAL_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def with_calls(turn: Completion, parser: str, tools: Sequence[Tool], marked: str | None = None) -> Completion:
    """Return a turn with the calls in its text, and with the text before them as its `content`. `marked`: the
    text with special tokens, for the parsers of MARKED. The values have the types that the schema of the
    function asks for. `unread_calls` counts calls that are malformed, or that name none of `tools`.

    There are none if the turn was cut. A call in the reasoning of a model (before `</think>`) is none.
    """
    if turn.finish_reason != "stop":
        return replace(turn, unread_calls=0)
    text = turn.text if marked is None else marked
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    begin = _behind_reasoning(text, parser, schemas)
    before, read = _read(parser, text[begin:], schemas)
    if not read:  # a call of these functions without the marks of the family
        read = [None for call in _read("llama3_json", text[begin:], schemas)[1] if call is not None]
    if not read and any(call[call.lastindex or 0] in schemas for call in _OTHER_CALL.finditer(text, begin)):
        read = [None]
    calls = [call for call in read if call is not None]
    seed = hashlib.sha256(json.dumps([turn.prompt_ids, turn.token_ids]).encode()).hexdigest()
    ids = [call.id or _id(f"{seed}/{number}") for number, call in enumerate(calls)]
    if len(set(ids)) < len(ids):
        calls = []
    if not calls:
        return replace(turn, unread_calls=len(read))
    tool_calls = [ToolCall(id, call.name, call.arguments) for id, call in zip(ids, calls, strict=True)]
    content = (text[:begin] + before).rstrip()
    return replace(turn, calls=tool_calls, content=content, unread_calls=len(read) - len(calls))


def _read(parser: str, text: str, schemas: Mapping[str, Any]) -> Found:
    """Return the Found of a parser, with None for what is no call of these functions."""
    try:
        before, calls = PARSERS[parser](text, schemas)
    except (ValueError, RecursionError):
        return text, [None]
    return before, [_fitting(call, schemas) for call in calls]


def _fitting(call: ParsedCall | None, schemas: Mapping[str, Any]) -> ParsedCall | None:
    if call is None or call.name not in schemas or not isinstance(call.arguments, dict):
        return None
    try:
        # 1e999 is read as infinity, and half a character is no text.
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
        return call._replace(arguments=fitted(call.arguments, schemas[call.name]))
    except (ValueError, RecursionError):
        return None


def _behind_reasoning(text: str, parser: str, schemas: Mapping[str, Any]) -> int:
    """Return where the reasoning has ended: behind the last mark of its end that is in no call."""
    end = _REASONING_ENDS.get(parser, "</think>")
    if end is None:
        return 0
    opens, closes = _AROUND[parser]
    at = text.rfind(end)
    while at >= 0:
        begin = text.rfind(opens, 0, at) if opens else 0
        close = text.find(closes, at) if closes else len(text)
        is_argument = begin >= 0 and close >= 0
        if is_argument:
            _, calls = _read(parser, text[begin : close + len(closes)], schemas)
            _, earlier = _read(parser, text[begin:at], schemas)
            later = [] if opens else _read(parser, text[at + len(end) :], schemas)[1]
            complete = len([call for call in (*earlier, *later) if call is not None])
            is_argument = bool(calls) and None not in calls and len(calls) > complete
            is_argument &= not (closes and complete)  # else the call had ended before the mark
        if not is_argument:
            return at + len(end)
        at = text.rfind(end, 0, at)
    return 0


def _id(text: str) -> str:
    """Return nine letters and digits, the only form that all chat templates accept (Mistral's)."""
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def _hermes(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        value, end = read_json(text, mark.end())
        return [call_of(value)], end_behind(text, _CLOSE, end)

    return calls_behind(text, re.compile(_OPEN), read)


def _qwen3_coder(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder,
    which leaves the first mark out at times, Qwen3.5 and later.
    """

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        head = _QWEN_NAME.match(text, mark.end())
        if head is None or not mark[0].endswith("="):
            raise NoCall
        arguments, end, schema = dict[str, Any](), head.end(), schemas.get(head[1])
        while argument := _QWEN_ARGUMENT.match(text, end):
            name, value = argument[1], argument[2]
            parameters = re.findall(r"<parameter=([^>\n]+)>", value)
            known = (schema or {}).get("properties") or ()
            if re.search(r"</function>\s*</tool_call>", value) or any(
                other in known or not known for other in parameters
            ):
                raise NoCall  # of the next argument, or call: this argument has no end
            arguments[name] = argument_of(value.removeprefix("\n").removesuffix("\n"), name, schema)
            end = argument.end()
        end = end_behind(text, "</function>", end)
        if mark[0].startswith(_OPEN) or text[end:].lstrip().startswith(_CLOSE):
            end = end_behind(text, _CLOSE, end)
        return [ParsedCall(head[1], arguments)], end

    return calls_behind(text, _QWEN_MARK, read)


def _llama3_json(text: str, schemas: Mapping[str, Any]) -> Found:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, also behind words: Llama 3. An
    object is a call wherever it begins, as for vLLM.
    """
    is_marked = text.lstrip().startswith(_PYTHON_TAG)
    before, calls, at = text, list[ParsedCall | None](), 0
    while mark := _LLAMA_MARK.search(text, at):
        at = mark.end()
        try:
            value, at = read_json(text, mark.start())
            has_arguments = value.keys() & {"parameters", "arguments", "function"}
            if not has_arguments and str(value.get("name")) not in schemas:
                continue
            call = call_of(value)
        except RecursionError:
            return before, [*calls, None]  # so would each of the objects inside
        except ValueError:
            if not is_marked and mark["name"] not in schemas:
                continue
            call = None
        before = before if calls else _OPENING.sub("", text[: mark.start()])
        calls.append(call)
    return before, calls or [None] * is_marked


def _mistral(text: str, schemas: Mapping[str, Any]) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each `[TOOL_CALLS]NAME[ARGS]{...}`:
    Mistral. The marks may be missing: engines leave special tokens out of the text.
    """
    before, mark, calls_text = text.partition(MISTRAL_MARK)
    calls_text = (calls_text if mark else text).strip()
    calls: list[ParsedCall | None] = []
    try:
        if calls_text.startswith("["):
            values, end = read_json(calls_text)
            if calls_text[end:].strip() or not isinstance(values, list):
                raise NoCall
            if not mark and not all(isinstance(value, dict) for value in values):
                return "", []
            return before if mark else "", [_call_or_none(value) for value in values]
        while calls_text:
            match = _MISTRAL_NAME.match(calls_text)
            if match is None or (not match[2] and match[1] not in schemas):
                raise NoCall
            arguments, end = read_json(calls_text, match.end()) if match[2] else ({}, match.end())
            calls.append(ParsedCall(match[1], arguments))
            calls_text = calls_text[end:].strip().removeprefix(MISTRAL_MARK)
    except (ValueError, RecursionError):
        return before if mark else "", [*calls, None] if calls or mark else []
    return before if mark else "", calls


def _call_or_none(value: Any) -> ParsedCall | None:
    try:
        return call_of(value)
    except ValueError:
        return None


_LLAMA_MARK = re.compile(
    r'\{\s*"(?:name|function|type|id|parameters|arguments)"\s*:\s*(?:"(?P<name>[^"\\]*)")?'
)
_OTHER_CALL = re.compile(
    r"\[\s*([\w.-]+)\(|(?:<function=|\binvoke name=\"|\bcall:)([\w.-]+)[>\"{]"
    r"|(?<![^\s\]>])([\w.-]+)(?=<\uff5ctool▁sep\uff5c>|\[ARGS\]|\s*(?:```json\s*)?\{\s*\")"
    r"|(?:<\uff5ctool▁sep\uff5c>|\bfunctions\.)([\w-]+)"
    r'|"(?:tool|tool_name|action)"\s*:\s*"([^"]+)"'
)
"""A call as other families write it, with the marks that are special tokens or without: of Llama 4 and 3.1,
MiniMax, Gemma 4, DeepSeek, Mistral, Kimi K2, gpt-oss, and as prompts ask for it.
"""
_OPENING = re.compile(r"\s*(?:```\w*|<\|python_tag\|>)?\s*\[?\s*\Z")
"""What stands before a call and is none of the words before it."""
_QWEN_MARK = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
_QWEN_NAME = re.compile(r"([^>\n]+)>")
_QWEN_ARGUMENT = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>))", re.DOTALL
)
_MISTRAL_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?:(?=(\{))|(?=\[TOOL_CALLS\]|$))")
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
_AROUND = {
    "hermes": (_OPEN, _CLOSE),
    "qwen3_coder": ("<function=", "</function>"),
    "llama3_json": ("", ""),
    "mistral": (MISTRAL_MARK, ""),
    "glm45": (_OPEN, _CLOSE),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""What begins and ends a call, where one can tell."""
_REASONING_ENDS = {"openai": None, "gemma4": "<channel|>"}
