"""Calls between marks of their own: GLM, gpt-oss, Gemma 4, LFM2. Each whole, or not at all."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.completion import Completion
from rollout.environments.tool_calls import MARKED, with_calls

Calls = list[tuple[str, dict[str, Any]]]
NAMES = ["add", "note", "get-it", "a.b"]
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in NAMES[1:]]
TOOLS.append(
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"unit": {"type": "string"}, "a": {}}},
        },
    }
)


def read(parser: str, text: str, finish_reason: str = "stop") -> Completion:
    plain = "what engines leave of the text"
    return with_calls(Completion([1], [2], [0.0], plain, finish_reason), parser, TOOLS, text)


def calls_in(parser: str, text: str) -> Calls:
    return [(call.name, call.arguments) for call in read(parser, text).calls]


GEMMA = "<|tool_call>call:add{%s}<tool_call|>"
HEAD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
LFM = "<|tool_call_start|>[%s]<|tool_call_end|>"
GLM = "<tool_call>add%s</tool_call>"


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("glm45", "<tool_call>note\n</tool_call>", [("note", {})]),
        ("glm45", "<tool_call>note</tool_call>", [("note", {})]),
        ("glm45", GLM % "<arg_key>unit</arg_key><arg_value>7</arg_value>", [("add", {"unit": "7"})]),
        ("glm45", GLM % '\n<arg_key>a</arg_key>\n<arg_value>[{}]</arg_value>\n', [("add", {"a": [{}]})]),
        ("glm45", GLM % "<arg_key>a</arg_key><arg_value>\n a\n</arg_value>", [("add", {"a": "\n a\n"})]),
        (
            "glm45",
            "<think>x</think>I add." + GLM % "<arg_key>a</arg_key><arg_value></tool_call></arg_value>"
            + "\n<tool_call>note\n</tool_call><|observation|>",
            [("add", {"a": "</tool_call>"}), ("note", {})],
        ),
        ("glm45", "<think>" + GLM % "" + "</think>No.", []),
        ("glm45", GLM % "<arg_key>a</arg_key><arg_value>1", []),
        ("glm45", GLM % "<arg_key>a</arg_key>", []),
        ("glm45", GLM % "<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>", []),
        ("glm45", GLM % "<arg_key>a<arg_value>1</arg_value>", []),
        ("glm45", GLM % " text ", []),
        ("glm45", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', []),
        ("glm45", "<tool_call>", []),
        ("glm45", "<tool_call></tool_call>", []),
        ("openai", HEAD + '{"a": {"b": "<|call|>"}}<|call|>', [("add", {"a": {"b": "<|call|>"}})]),
        ("openai", " to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [("add", {})]),
        ("openai", "Sum.<|end|><|start|>assistant" + HEAD + "{}<|call|>", [("add", {})]),
        ("openai", "<|channel|>analysis to=functions.a.b code<|message|> {} <|call|>", [("a.b", {})]),
        ("openai", HEAD + "{}<|end|>", []),
        ("openai", HEAD + "{}", []),
        ("openai", HEAD + '{"a": 1,}<|call|>', []),
        ("openai", HEAD + "[1]<|call|>", []),
        ("openai", HEAD + "27+58<|call|>", []),
        ("openai", HEAD.replace("functions.", "") + "{}<|call|>", []),
        ("openai", "<|channel|>analysis to=python code<|message|>print()<|call|>", []),
        ("openai", HEAD + "{}<|call|><|start|>functions.add to=assistant<|message|>85<|end|>", []),
        ("openai", "<|channel|>final<|message|>to=functions.add<|return|>", []),
        ("openai", "<|start|>", []),
        ("gemma4", GEMMA % "", [("add", {})]),
        (
            "gemma4",
            GEMMA % '<|"|>a<|"|>:-1.5e-07,b:[true,null,[],{c d:<|"|>{},:"<|"|>}],c:False,ü:None',
            [("add", {"a": -1.5e-7, "b": [True, None, [], {"c d": '{},:"'}], "c": False, "ü": None})],
        ),
        ("gemma4", GEMMA % "a:1" + GEMMA % "" + "<|tool_response>", [("add", {"a": 1}), ("add", {})]),
        ("gemma4", "<|channel>thought\n" + GEMMA % "" + "<channel|>No.<turn|>", []),
        ("gemma4", GEMMA % 'a:<|"|><|tool_call><|"|>', [("add", {"a": "<|tool_call>"})]),
        ("gemma4", GEMMA % "a:tree", []),
        ("gemma4", GEMMA % 'a:"tree"', []),
        ("gemma4", GEMMA % "a:1,", []),
        ("gemma4", GEMMA % "a", []),
        ("gemma4", GEMMA % "a:01", []),
        ("gemma4", GEMMA % "a:1e999", []),
        ("gemma4", GEMMA % 'a:<|"|>b', []),
        ("gemma4", GEMMA % ("a:" + "[" * 100_000), []),
        ("gemma4", "<|tool_call>add{}<tool_call|>", []),
        ("gemma4", "<|tool_call>call:add{}", []),
        ("gemma4", "<|tool_call>call:add[]<tool_call|>", []),
        ("lfm2", LFM % "add()", [("add", {})]),
        (
            "lfm2",
            "So. " + LFM % "get-it(from='it\\'s \\u00fc\\n', b=[True, None, -1.5], c={\"d\": {'e': false}})",
            [("get-it", {"from": "it's ü\n", "b": [True, None, -1.5], "c": {"d": {"e": False}}})],
        ),
        ("lfm2", LFM % 'add(a="x = [1]\ny = \'2\'")', [("add", {"a": "x = [1]\ny = '2'"})]),
        ("lfm2", LFM % '{"name": "add", "arguments": {"a": "\\ud83d\\ude00"}}', [("add", {"a": "😀"})]),
        ("lfm2", LFM % "add()" + LFM % "note()", [("add", {}), ("note", {})]),
        ("lfm2", LFM % "add(a='<|tool_call_start|>')", [("add", {"a": "<|tool_call_start|>"})]),
        ("lfm2", LFM % "add(1)", []),
        ("lfm2", LFM % "add(a=b)", []),
        ("lfm2", LFM % "add(a=1+1)", []),
        ("lfm2", LFM % "add(a={b: 1})", []),
        ("lfm2", LFM % "add(a='it's')", []),
        ("lfm2", LFM % "add(a='\\ud800')", []),
        ("lfm2", LFM % "add(a=note())", []),
        ("lfm2", LFM % "add(a=" + "9" * 5000 + ")", []),
        ("lfm2", LFM % "add(), sub()", [("add", {})]),
        ("lfm2", LFM % "", []),
        ("lfm2", "<|tool_call_start|>add()<|tool_call_end|>", []),
        ("lfm2", "<|tool_call_start|>[add()]", []),
        ("lfm2", "[add()]", []),
    ],
)  # fmt: skip
def test_calls_between_marks_are_read_whole_or_not_at_all(parser: str, text: str, calls: Calls) -> None:
    assert calls_in(parser, text) == calls
    assert not read(parser, text, "length").calls
    for other in MARKED:  # none fails on what is written for another
        read(other, text)


def test_content_is_what_the_model_has_said_before_its_calls() -> None:
    assert read("gemma4", "<|channel>thought\nSum.<channel|>\n" + GEMMA % "").content == (
        "<|channel>thought\nSum.<channel|>"
    )
    assert read("lfm2", "I add. " + LFM % "add()" + " Done.").content == "I add."
    assert read("glm45", "\n<think>a</think>\nI add.\n" + GLM % "").content == "\n<think>a</think>\nI add."
    said = "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary<|message|>I add."
    assert read("openai", said + "<|end|><|start|>assistant" + HEAD + "{}<|call|>").content == "Sum.\nI add."


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _glm_argument(name: str, value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"\n<arg_key>{name}</arg_key>\n<arg_value>{said}</arg_value>"


def _python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "glm45": lambda calls: "".join(
        f"\n<tool_call>{name}{''.join(_glm_argument(*one) for one in arguments.items())}\n</tool_call>"
        for name, arguments in calls
    ),
    "openai": lambda calls: "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ),
    "gemma4": lambda calls: "".join(
        f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls
    ),
    "lfm2": lambda calls: LFM % ", ".join(_python_call(*call) for call in calls),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), max_size=12)
KEYS = st.from_regex(r"[a-zA-Zäß_][\w]{0,5}", fullmatch=True)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3
)


@pytest.mark.parametrize("parser", sorted(MARKED))
@given(calls=CALLS)
@settings(max_examples=40)
def test_what_is_written_is_read(parser: str, calls: Calls) -> None:
    if parser == "glm45":  # a text that looks like JSON is not told apart from JSON
        calls = [
            (name, {key: f"{value}." if isinstance(value, str) else value for key, value in given.items()})
            for name, given in calls
        ]
    assert calls_in(parser, "<think>a</think>" * (parser != "openai") + WRITERS[parser](calls)) == calls


@pytest.mark.parametrize("parser", sorted(MARKED))
@given(calls=CALLS, data=st.data())
@settings(max_examples=40)
def test_text_that_is_cut_or_damaged_holds_no_half_calls(
    parser: str, calls: Calls, data: st.DataObject
) -> None:
    text = WRITERS[parser](calls[:1])
    at = data.draw(st.integers(0, len(text) - 1))
    assert calls_in(parser, text[:at]) == []
    damaged = text[:at] + data.draw(TEXTS | st.sampled_from('<{"}>')) + text[at + 1 :]
    for _, arguments in calls_in(parser, damaged):
        json.dumps(arguments, allow_nan=False)
