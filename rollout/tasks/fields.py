"""Make a task of a row, and check its fields."""

import json
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from rollout.tasks.rows import Row


def task_of(row: Row, number: int, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row as a task; ValueError with the reason. `columns` names the column of a field; `number` is
    the task's id if it has none.
    """
    if not isinstance(row.fields, dict):
        raise ValueError(f"expected a JSON object, got {_kind(row.fields)}")
    task = _renamed(row.fields, columns)
    text = task.get("messages")
    if row.is_text and isinstance(text, str) and text.startswith("["):
        try:
            task["messages"] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_named('messages', columns)} is not JSON: {error}") from None
    elif isinstance(text, str) and text:
        task["messages"] = [{"role": "user", "content": text}]
    _take_conversation(task)
    if ("prompt" in task) == ("messages" in task):
        found = "both are there" if "prompt" in task else "neither is there"
        hint = "" if columns or "prompt" in task else _hint(task)
        raise ValueError(f"give either `prompt` or `messages`; {found}{hint}")
    task.setdefault("id", number)
    for name, check in _FIELD_CHECKS.items():
        if name in task and (wanted := check(task[name])):
            raise ValueError(f"{_named(name, columns)} must be {wanted}, got {_kind(task[name])}")
    task["id"] = str(task["id"])
    return task


def _take_conversation(task: dict[str, Any]) -> None:
    """Turn a `prompt` of messages into `messages`. A preference without either has the messages with which
    both `chosen` and `rejected` begin.
    """
    if "messages" in task:
        return
    answers = [task.get(name) for name in ("chosen", "rejected")]
    if isinstance(task.get("prompt"), list):
        task["messages"] = task.pop("prompt")
    elif "prompt" not in task and all(isinstance(answer, list) for answer in answers):
        pairs = zip(*answers, strict=False)  # pyright: ignore[reportArgumentType]
        task["messages"] = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    for field, column in columns.items():
        if column not in fields:
            there = ", ".join(map(str, fields))
            raise ValueError(
                f"nothing in the column {column!r} (columns.{field}); there is {there or 'none'}"
            )
    others = {
        name: value for name, value in fields.items() if name not in columns and name not in columns.values()
    }
    return {**others, **{field: fields[column] for field, column in columns.items()}}


def _hint(task: Mapping[str, Any]) -> str:
    there = ", ".join(map(str, task))
    return f"; name its column, e.g. columns.prompt=COLUMN (there is {there})" if there else ""


def _named(field: str, columns: Mapping[str, str]) -> str:
    return f"`{field}` (the column {columns[field]!r})" if field in columns else f"`{field}`"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}
    if isinstance(value, (list, str)) and not value:
        return f"an empty {'array' if isinstance(value, list) else 'string'}"
    return names.get(type(value), "a string" if isinstance(value, str) else "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_id(value: object) -> str | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return None if is_integer or (isinstance(value, str) and value) else "a non-empty string or an integer"


def _check_prompt(value: object) -> str | None:
    return None if isinstance(value, str) and value else "a non-empty string, or an array of messages"


def _check_messages(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "a non-empty array of messages, or the text of one"
    for message in value:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return "messages that each hold the strings `role` and `content`"
    return None


def _check_answer(value: object) -> str | None:
    return (
        None
        if isinstance(value, str) or _is_number(value)
        else "a string or a number (other data: another field)"
    )


_FIELD_CHECKS: dict[str, Callable[[object], str | None]] = {
    "id": _check_id,
    "prompt": _check_prompt,
    "messages": _check_messages,
    "answer": _check_answer,
}
"""For each known field a check: it returns what the value must be, or None if the value is valid."""
