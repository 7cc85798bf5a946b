"""What is said of a value that a setting does not take: what to give in its place."""

from collections.abc import Mapping
from typing import Any

_WHOLE, _NUMBER, _TRUTH, _TEXT = "give a whole number", "give a number", "give true or false", "give a text"
_ADVICE = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), _WHOLE),
    **dict.fromkeys(("float_parsing", "float_type"), _NUMBER),
    "finite_number": "give a finite number",
    **dict.fromkeys(("bool_parsing", "bool_type"), _TRUTH),
    "string_type": _TEXT,
    "string_too_short": f"is empty; {_TEXT}",
    "greater_than": "give more than {gt:g}",
    "greater_than_equal": "give {ge:g} or more",
    "less_than": "give less than {lt:g}",
    "less_than_equal": "give {le:g} or less",
    "literal_error": "give {expected}",
}
"""By the type of pydantic's error."""


def advice_on(details: Mapping[str, Any]) -> str:
    """Return what to give in place of a value that pydantic refuses, in one of its `errors()`."""
    template = _ADVICE.get(details["type"])
    if template is None:
        text = str(details["msg"]).partition(", unable to")[0]
        return f"{text[:1].lower()}{text[1:]}"
    return template.format(**details.get("ctx", {})).replace("'", "")
