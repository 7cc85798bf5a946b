"""Give the values in a model's tool calls the types that the schema of the function asks for. Pure."""

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from rollout.environments.call_values import read_json

_DEEPEST = 16
"""Most references and unions within each other that are followed in a schema."""
_KINDS: list[tuple[str, Any]] = [
    ("boolean", bool),
    ("integer", int),
    ("number", (int, float)),
    ("string", str),
    ("array", list),
    ("object", dict),
    ("null", type(None)),
]
_OTHER_NAMES = {
    **{"int": "integer", "float": "number", "double": "number", "bool": "boolean", "str": "string"},
    **{"dict": "object", "list": "array", "tuple": "array", "none": "null"},
}
"""Types that are no JSON Schema's, by which tools say the same."""
Schema = Mapping[str, Any]


def fitted(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return arguments of which texts, whole numbers with a fraction, and what should be a text are what the
    schema asks for.
    """
    return {name: _fitted(value, _property(schema, name), schema) for name, value in arguments.items()}


def _fitted(value: Any, schema: Any, root: Schema) -> Any:
    types, choices = types_of(schema, root)
    if isinstance(value, str) and types and "string" not in types:
        value = _read(value, types, choices)
    elif isinstance(value, str) and value not in choices:
        value = next((choice for choice in choices if value.strip() == json.dumps(choice)), value)
    if types and types <= {"string", "null"} and not isinstance(value, str | None):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer() and types and not types & {"number", "string"}:
        return int(value) if "integer" in types else value
    shapes = list(_shapes(schema, root)) if isinstance(value, dict | list) else []
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {
            name: _fitted(item, _within(shapes, lambda shape, name=name: _property(shape, name)), root)
            for name, item in items
        }
    if isinstance(value, list):
        return [
            _fitted(item, _within(shapes, lambda shape, at=at: _item(shape, at)), root)
            for at, item in enumerate(cast("list[Any]", value))
        ]
    return value


def _shapes(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """Yield a schema and those that it is made of."""
    schema = _resolved(schema, root)
    yield schema
    for union in ("anyOf", "oneOf", "allOf") if depth < _DEEPEST else ():
        for part in schema.get(union) or ():
            yield from _shapes(part, root, depth + 1)


def _within(shapes: Sequence[Schema], part: Callable[[Schema], Any]) -> Any:
    """Return the schema of what is within a value, which may have any of these shapes."""
    known = [schema for shape in shapes if (schema := part(shape)) is not None]
    return known[0] if len(known) == 1 else {"anyOf": known}


def argument_of(text: str, name: str, schema: Any) -> Any:
    """Return an argument that is written without quotes, as the schema of the function has it: a text where
    that is asked for. What has no type there is what JSON makes of it, or the text if it is no JSON.
    """
    root: Schema = schema if isinstance(schema, Mapping) else {}
    types, choices = types_of(_property(root, name), root)
    return _fitted(_read(text, types, choices), _property(root, name), root)


def types_of(schema: Any, root: Schema, depth: int = 0) -> tuple[set[str], list[Any]]:
    """Return the names of the types that a schema allows, none if it does not say, and the values if it
    lists them.
    """
    schema = _resolved(schema, root)
    if depth > _DEEPEST or not schema:
        return set(), []
    choices = [schema["const"]] if "const" in schema else list(schema.get("enum") or ())
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, Sequence) else []
    types = {_OTHER_NAMES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    if choices and not types:
        types = {next(name for name, kind in _KINDS if isinstance(choice, kind)) for choice in choices}
    for union in ("anyOf", "oneOf"):
        parts = [types_of(part, root, depth + 1) for part in schema.get(union) or ()]
        if parts and all(kinds for kinds, _ in parts):
            types = types or set[str]().union(*(kinds for kinds, _ in parts))
            choices = choices or [choice for _, values in parts for choice in values]
    for part in schema.get("allOf") or ():
        kinds, values = types_of(part, root, depth + 1)
        types, choices = (types & kinds or kinds) if types and kinds else types or kinds, choices or values
    if not types and "properties" in schema:
        types = {"object"}
    if not types and "items" in schema:
        types = {"array"}
    return types | ({"null"} if types and schema.get("nullable") is True else set()), choices


def _resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema that a reference within the function's schema leads to."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        place: Any = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            place = (
                place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
            )
        schema = place
    return schema if isinstance(schema, Mapping) else {}


def _property(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    known = properties.get(name) if isinstance(properties, Mapping) else None
    if known is None and isinstance(patterns := schema.get("patternProperties"), Mapping):
        with contextlib.suppress(re.error):
            known = next((each for pattern, each in patterns.items() if re.search(pattern, name)), None)
    return known if known is not None else schema.get("additionalProperties")


def _item(schema: Schema, at: int) -> Any:
    first = schema.get("prefixItems")
    return first[at] if isinstance(first, list) and at < len(first) else schema.get("items")


def _read(text: str, types: set[str], choices: Sequence[Any]) -> Any:
    """Return the value of a text in one of the types; the text itself if it has none in these."""
    stripped = text.strip()
    for choice in choices:
        if stripped in (choice, json.dumps(choice)):
            return choice
    if types == {"string"}:
        return text
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in types and stripped in (("null",) if "string" in types else ("null", "None", "")):
        return None
    for name, kind in _KINDS if types else []:
        if name in types - {"string", "boolean", "null"}:
            for value in _values(stripped):
                if isinstance(value, float) and name == "integer" and value.is_integer():
                    value = int(value)
                if isinstance(value, kind) and not isinstance(value, bool):
                    return value
    if types:
        return text
    value = next(iter(_values(stripped, python=False)), text)
    return value


def _values(text: str, *, python: bool = True) -> list[Any]:
    """Return the value of a text as JSON, or else as Python writes it."""
    try:
        value, end = read_json(text)
        if not text[end:].strip():
            return [value]
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text) if python else None
        value = list(value) if isinstance(value, tuple) else value
        finite = not isinstance(value, float) or math.isfinite(value)
        return [json.loads(json.dumps(value, allow_nan=False))] if python and finite else []
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
