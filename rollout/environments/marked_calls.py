"""Find tool calls between marks that are tokens of their own: GLM, gpt-oss, Gemma 4, LFM2. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from rollout.environments.call_schema import argument_of
from rollout.environments.call_values import (
    Found,
    NoCall,
    ParsedCall,
    Reader,
    call_of,
    calls_behind,
    end_behind,
    python_string,
    read_json,
)


def glm(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`: GLM-4.5 and later,
    with line breaks between the parts or without.
    """

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        head = _GLM_NAME.match(text, mark.end())
        if head is None:
            raise NoCall
        arguments, at = dict[str, Any](), head.end()
        while argument := _GLM_ARGUMENT.match(text, at):
            name, value = argument[1].strip(), argument[2]
            if "<arg_value>" in value:  # of the next argument: this one has no end
                raise NoCall
            arguments[name], at = argument_of(value, name, schemas.get(head[1])), argument.end()
        return [ParsedCall(head[1], arguments)], end_behind(text, "</tool_call>", at)

    return calls_behind(text, re.compile("<tool_call>"), read)


def harmony(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`: gpt-oss. The text
    goes on behind `<|start|>assistant`. What is said before is that of its messages, without their heads.
    """
    texts, calls = list[str](), list[ParsedCall | None]()
    for message in text.split("<|start|>"):
        head, mark, body = message.partition("<|message|>")
        if not mark:  # the template has begun a message
            head, body = "", head
        to = re.search(r"\bto=(\S+?)(?=<\||\s|$)", head)
        if to is None:
            texts += [] if calls else [re.split(r"<\|(?:end|return)\|>", body, maxsplit=1)[0]]
            continue
        if to[1] == "assistant":  # a result that the model makes up
            raise NoCall
        try:
            is_empty = body.lstrip().startswith("<|call|>")
            arguments, end = ({}, 0) if is_empty else read_json(body)
            if not to[1].startswith("functions.") or body[end:].strip() != "<|call|>":
                raise NoCall
            calls.append(call_of({"name": to[1].removeprefix("functions."), "arguments": arguments}))
        except (ValueError, RecursionError):
            calls.append(None)
    return "\n".join(texts), calls


def gemma4(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, strings between `<|"|>`: Gemma 4."""
    reader = Reader(text, _GEMMA_STRING, key=_GEMMA_KEY)

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        reader.at = mark.end()
        reader.expect("call:")
        name = reader.name()
        is_empty = text.startswith("<tool_call|>", reader.at)
        arguments = {} if is_empty else reader.value()
        reader.expect("<tool_call|>")
        if not isinstance(arguments, dict):
            raise NoCall
        return [ParsedCall(name, arguments)], reader.at

    return calls_behind(text, re.compile(r"<\|tool_call>"), read)


def lfm2(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`, with values as Python has them, or
    the list holds objects of JSON: LFM2.
    """
    reader = Reader(text, _PYTHON_STRING, unescape=python_string)

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        reader.at = mark.end()
        reader.expect("[")
        calls = reader.items("]", lambda: _lfm2_call(reader))
        reader.expect("<|tool_call_end|>")
        return calls, reader.at

    return calls_behind(text, re.compile(r"<\|tool_call_start\|>"), read)


def _lfm2_call(reader: Reader) -> ParsedCall:
    reader.take("")
    if reader.text.startswith("{", reader.at):
        return call_of(reader.value())
    name = reader.name()
    reader.expect("(")
    return ParsedCall(name, dict(reader.items(")", reader.argument)))


_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)
_GEMMA_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_KEY = re.compile(r"[^:,{}\[\]<>]+")
_PYTHON_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
