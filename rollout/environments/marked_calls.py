"""Find tool calls between marks that are tokens of their own: GLM, gpt-oss, Gemma 4, LFM2. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from rollout.environments.call_values import (
    Call,
    Found,
    NoCall,
    Reader,
    argument_of,
    call_of,
    python_string,
    read_json,
)


def glm(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`: GLM-4.5 and later,
    with line breaks between the parts or without.
    """
    at, calls = text.find("<tool_call>"), list[Call]()
    while at >= 0:
        head = _GLM_NAME.match(text, at)
        if head is None:
            raise NoCall
        arguments, at = dict[str, Any](), head.end()
        while argument := _GLM_ARGUMENT.match(text, at):
            name, value = argument[1].strip(), argument[2]
            if "<arg_" in value:  # of the next argument: this one has no end
                raise NoCall
            arguments[name], at = argument_of(value, name, schemas.get(head[1])), argument.end()
        if not text.startswith("</tool_call>", at):
            raise NoCall
        calls.append(Call(head[1], arguments))
        at = text.find("<tool_call>", at)
    return text.partition("<tool_call>")[0], calls


def harmony(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`: gpt-oss. The text
    goes on behind `<|start|>assistant`. What is said before is that of its messages, without their heads.
    """
    said, calls = list[str](), list[Call]()
    for message in text.split("<|start|>"):
        head, mark, body = message.partition("<|message|>")
        if not mark:  # the template has begun a message
            head, body = "", head
        to = re.search(r"\bto=(\S+?)(?=<\||\s|$)", head)
        if to is None:
            said += [] if calls else [re.split(r"<\|(?:end|return)\|>", body, maxsplit=1)[0]]
            continue
        arguments, end = read_json(body)
        if not to[1].startswith("functions.") or body[end:].strip() != "<|call|>":
            raise NoCall
        calls.append(call_of({"name": to[1].removeprefix("functions."), "arguments": arguments}))
    return "\n".join(said), calls


def gemma4(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, strings between `<|"|>`: Gemma 4."""
    reader = Reader(text, _GEMMA_STRING, key=_GEMMA_KEY)
    calls: list[Call] = []
    while _go_behind(reader, "<|tool_call>"):
        reader.expect("call:")
        calls.append(call_of({"name": reader.name(), "arguments": reader.value()}))
        reader.expect("<tool_call|>")
    return text.partition("<|tool_call>")[0], calls


def lfm2(text: str, schemas: Mapping[str, Any]) -> Found:
    """`<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`, with values as Python has them, or
    the list holds objects of JSON: LFM2.
    """
    reader = Reader(text, _PYTHON_STRING, unescape=python_string)
    calls: list[Call] = []
    while _go_behind(reader, "<|tool_call_start|>"):
        reader.expect("[")
        calls += reader.items("]", lambda: _lfm2_call(reader))
        reader.expect("<|tool_call_end|>")
    return text.partition("<|tool_call_start|>")[0], calls


def _lfm2_call(reader: Reader) -> Call:
    reader.take("")
    if reader.text.startswith("{", reader.at):
        return call_of(reader.value())
    name = reader.name()
    reader.expect("(")
    return Call(name, dict(reader.items(")", reader.argument)))


def _go_behind(reader: Reader, mark: str) -> bool:
    """Return whether the mark comes again; if so, go behind it."""
    at = reader.text.find(mark, reader.at)
    reader.at = max(reader.at, at + len(mark) * (at >= 0))
    return at >= 0


_GLM_NAME = re.compile(r"<tool_call>\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_GEMMA_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_KEY = re.compile(r"[^:,{}\[\]<>]+")
_PYTHON_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
