"""Tool calls as models write them: values by the schema, all ways to say nothing, and what cannot be read."""

import json
from typing import Any

import pytest

from rollout.engines.completion import Completion
from rollout.environments.call_schema import argument_of, fitted
from rollout.environments.tool_calls import PARSERS, with_calls
from rollout.environments.turns import sample_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Side": {"enum": ["left", "right"]},
        "Deep": {"$ref": "#/$defs/Count"},
        "Count": {"type": "integer"},
    },
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"type": "object"},
        "listed": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "one": {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]},
        "all": {"allOf": [{"$ref": "#/$defs/Count"}, {"description": "how many"}]},
        "ref": {"$ref": "#/$defs/Deep"},
        "side": {"$ref": "#/$defs/Side"},
        "choice": {"enum": [1, 2, "3"]},
        "const": {"const": 5},
        "maybe": {"type": ["string", "null"]},
        "nullable": {"type": "integer", "nullable": True},
        "loop": {"$ref": "#/properties/loop"},
        "nested": {"type": "object", "properties": {"b": {"type": "boolean"}}},
        "items": {"type": "array", "items": {"type": "integer"}},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
VALUES = [
    ("s", "5", "5"),
    ("s", "null", "null"),
    ("i", "5", 5),
    ("i", "5.0", 5),
    ("n", "5", 5),
    ("n", "1e3", 1000.0),
    ("b", "False", False),
    ("b", "true", True),
    ("l", "['a', True]", ["a", True]),
    ("l", '["a"]', ["a"]),
    ("l", "(1, 2)", [1, 2]),
    ("o", "{'a': None}", {"a": None}),
    ("listed", "5", 5),
    ("listed", "null", None),
    ("any", "None", None),
    ("one", "false", False),
    ("one", '["x"]', ["x"]),
    ("all", "7", 7),
    ("ref", "7", 7),
    ("side", "left", "left"),
    ("choice", "2", 2),
    ("choice", "3", "3"),
    ("const", "5", 5),
    ("maybe", "null", None),
    ("maybe", "5", "5"),
    ("nullable", "null", None),
    ("nested", '{"b": "False"}', {"b": False}),
    ("items", '["1", 2.0]', [1, 2]),
    ("side", '"left"', "left"),
    ("i", "five", "five"),
    ("loop", "5", 5),
    ("unknown", "5", 5),
    ("unknown", "five", "five"),
]


def read(parser: str, text: str) -> Completion:
    return with_calls(Completion([1], [2], [0.0], text, "stop"), parser, TOOLS, text)


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_value_has_the_type_that_the_schema_asks_for(name: str, text: str, value: Any) -> None:
    found = argument_of(text, name, SCHEMA)
    assert (found, type(found)) == (value, type(value))


QWEN = "<tool_call>\n<function=%s>%s\n</function>\n</tool_call>"
CALLS = {
    "hermes": lambda name, arguments: f'<tool_call>{{"name": "{name}"{arguments}}}</tool_call>',
    "llama3_json": lambda name, arguments: f'{{"name": "{name}"{arguments}}}',
    "mistral": lambda name, arguments: f'[TOOL_CALLS][{{"name": "{name}"{arguments}}}]',
}


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize("nothing", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}',
                                     ', "parameters": "{}"', ', "arguments": " "',
                                     ', "arguments": []'])  # fmt: skip
def test_call_without_arguments_is_a_call_however_that_is_said(parser: str, nothing: str) -> None:
    (call,) = read(parser, CALLS[parser]("now", nothing)).calls
    assert (call.name, call.arguments) == ("now", {})


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", QWEN % ("now", "")),
        ("qwen3_coder", "<function=now></function>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("glm45", "<tool_call>now</tool_call>"),
        ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>"),
        ("gemma4", "<|tool_call>call:now<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>"),
    ],
)
def test_call_without_arguments_in_the_notations_of_other_families(parser: str, text: str) -> None:
    (call,) = read(parser, text).calls
    assert (call.name, call.arguments) == ("now", {})


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(
    "value", ["a </think> b", "line 1\nline 2", "</tool_call>", "<tool_call>", "[TOOL_CALLS]"]
)
def test_marks_and_line_breaks_inside_of_arguments_are_theirs(parser: str, value: str) -> None:
    raw = f', "arguments": {{"s": "{value}"}}'
    for arguments in (raw, f', "arguments": {json.dumps(json.dumps({"s": value}))}'):
        for thought in ("", "Sum.</think>"):
            (call,) = read(parser, thought + CALLS[parser]("f", arguments)).calls
            assert call.arguments == {"s": value}


@pytest.mark.parametrize(
    "value", ["a </think> b", "</parameter>", "<parameter=x>", "<function=f>", "</tool_call>"]
)
def test_marks_inside_of_values_without_quotes_are_theirs(value: str) -> None:
    text = QWEN % ("f", f"\n<parameter=s>\n{value}\n</parameter>\n<parameter=b>\nFalse\n</parameter>")
    (call,) = read("qwen3_coder", "Sum.\n</think>\n" + text).calls
    assert call.arguments == {"s": value, "b": False}


def test_values_of_json_have_the_types_of_the_schema_too() -> None:
    (call,) = read("hermes", CALLS["hermes"]("f", ', "arguments": {"b": "False", "i": 5.0, "s": 5}')).calls
    assert call.arguments == {"b": False, "i": 5, "s": "5"}


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("maybe_object", {"k": "5"}, {"k": 5}),
        ("maybe_object", '{"k": "5"}', {"k": 5}),
        ("maybe_items", ["1", 2.0], [1, 2]),
        ("map", {"x": "1", "y": 2}, {"x": 1, "y": 2}),
        ("patterns", {"x_1": "1", "y": 2}, {"x_1": 1, "y": "2"}),
        ("pair", ["1", 2], [1, "2"]),
        ("python", "5", 5),
        ("choice", "2", 2),
        ("choice", "3", "3"),
        ("choice", "4", "4"),
        ("google", "5", 5),
        ("s", {"a": 1}, '{"a": 1}'),
        ("s", None, None),
    ],
)
def test_values_within_values_have_the_types_of_the_schema(name: str, value: Any, typed: Any) -> None:
    item, counts = {"k": {"type": "integer"}}, {"type": "array", "items": {"$ref": "#/$defs/Count"}}
    properties = SCHEMA["properties"] | {
        "maybe_object": {"anyOf": [{"type": "object", "properties": item}, {"type": "null"}]},
        "maybe_items": {"anyOf": [counts, {"type": "null"}]},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "patterns": {"patternProperties": {"^x_": {"type": "integer"}, "y": {"type": "string"}}},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        "python": {"type": "int"},
        "google": {"type": "INTEGER"},
    }
    assert fitted({name: value}, SCHEMA | {"properties": properties}) == {name: typed}


@pytest.mark.parametrize(
    ("parser", "good", "bad"),
    [
        ("hermes", CALLS["hermes"]("now", ""), '<tool_call>{"name": "now",}</tool_call>'),
        ("hermes", CALLS["hermes"]("now", ""), CALLS["hermes"]("unknown", "")),
        ("llama3_json", CALLS["llama3_json"]("now", ""), 'I call {"name": "f", "parameters": {"s": "5",}}'),
        ("qwen3_coder", QWEN % ("now", ""), QWEN % ("f", "\n<parameter=s>5")),
        ("glm45", "<tool_call>now</tool_call>", "<tool_call></tool_call>"),
        ("gemma4", "<|tool_call>call:now{}<tool_call|>", "<|tool_call>call:f{s:tree}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ],
)
def test_call_that_cannot_be_read_hides_no_other_and_is_counted(parser: str, good: str, bad: str) -> None:
    for text in (good + bad, bad + good):
        turn = read(parser, text)
        assert [call.name for call in turn.calls] == ["now"] and turn.unread_calls == 1
    assert sample_of(read(parser, bad)).metrics == {"unread_calls": 1.0}
    assert sample_of(read(parser, good)).metrics == {"unread_calls": 0.0}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", CALLS["hermes"]("f", ', "args": {"s": "5"}')),
        ("hermes", CALLS["hermes"]("f", ', "arguments": {"s": "\\ud83d"}')),
        ("hermes", CALLS["llama3_json"]("f", ', "arguments": {"s": "5"}')),
        ("hermes", f"```json\n{CALLS['llama3_json']('f', '')}\n```"),
        ("qwen3_coder", CALLS["llama3_json"]("now", "")),
        ("llama3_json", '[f(s="5"), now()]'),
        ("llama3_json", '<function=f>{"s": "5"}</function>'),
        ("mistral", "[now()]"),
        ("mistral", 'I see.\nf[ARGS]{"s": "5"}'),
        ("hermes", '[TOOL_CALLS]f[ARGS]{"s": "5"}'),
        (
            "hermes",
            '<\uff5ctool▁call▁begin\uff5c>f<\uff5ctool▁sep\uff5c>{"s": "5"}<\uff5ctool▁call▁end\uff5c>',
        ),
        ("hermes", '<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json\n{"s": "5"}\n```'),
        ("qwen3_coder", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "5"}'),
        ("qwen3_coder", '<invoke name="f"><parameter name="s">5</parameter></invoke>'),
        ("hermes", '{"tool": "f", "parameters": {"s": "5"}}'),
    ],
)
def test_call_in_another_form_than_the_family_writes_is_counted(parser: str, text: str) -> None:
    turn = read(parser, text)
    assert (turn.calls, turn.unread_calls) == ((), 1)


@pytest.mark.parametrize("parser", CALLS)
def test_call_as_the_api_writes_it_is_read(parser: str) -> None:
    wrapped = CALLS[parser]("f", ', "arguments": {"s": "5"}').replace('{"name"', '{"function": {"name"')
    (call,) = read(parser, wrapped.replace('"5"}}', '"5"}}}')).calls
    assert call.arguments == {"s": "5"}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '[{"name": "f", "parameters": {"s": "5"}}]'),
        ("llama3_json", '{"type": "function", "function": "f", "parameters": {"s": "5"}}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"s": "5"}'),
        (
            "hermes",
            f"<think>{CALLS['hermes']('now', '')}</think>"
            + CALLS["hermes"]("f", ', "arguments": {"s": "5"}'),
        ),
        ("qwen3_coder", f"<think>{QWEN % ('now', '')}</think>" + QWEN % ("f", "<parameter=s>5</parameter>")),
    ],
)
def test_calls_of_neighbouring_forms_are_read_and_drafts_of_the_reasoning_are_none(
    parser: str, text: str
) -> None:
    (call,) = read(parser, text).calls
    assert (call.name, call.arguments) == ("f", {"s": "5"})


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text", ["It is 85.", "", '{"answer": 85}', "[1, 2]", "I <think> so.", "[g(3)]", "Call f, now."]
)
def test_answer_without_a_call_has_no_call_that_could_not_be_read(parser: str, text: str) -> None:
    turn = read(parser, text)
    assert not turn.calls and turn.unread_calls == 0


def test_turn_without_tools_counts_no_calls() -> None:
    assert sample_of(Completion([1], [2], [0.0], "<tool_call>", "stop")).metrics == {}
