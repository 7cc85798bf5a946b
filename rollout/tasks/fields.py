"""Make a task of a row, and check its fields."""

import contextlib
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from rollout.pictures import PictureError, pictures_in
from rollout.tasks.file_kinds import TaskRow
from rollout.tasks.messages import (
    ANSWER,
    WORDS,
    Message,
    checked_message,
    checked_tools,
    messages_of_text,
    same_beginning,
    with_beginning,
    without_answer,
)
from rollout.tasks.pictures import with_column

_CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected")
"""The fields that may be a list of messages."""
_NONE_IF_NULL = {*_CONVERSATIONS, "answer", "tools"}
_QUESTIONS = ("question", "problem", "instruction", "query")
"""What data sets call the question, a text."""
_ANSWERS = ("ground_truth", "final_answer", "completion", "response", "output", "solution", "target", "label")
"""What data sets call the field `answer`."""


def task_of(
    row: TaskRow, number: int, columns: Mapping[str, str], take: Callable[[Any], str] | None = None
) -> dict[str, Any]:
    """Return a row as a task; ValueError with the reason. `columns` names the column of a field; `number` is
    the task's id if it has none. Messages and tools are in one form. What the assistant says at the end of
    `messages` is the field ANSWER, and no part of them. `take` returns the digest of a picture, by which the
    messages show it.
    """
    if not isinstance(row.fields, dict):
        raise ValueError(f"expected a JSON object, got {_kind(row.fields)}")
    task = _renamed(row.fields, columns)
    task = {name: value for name, value in task.items() if value is not None or name not in _NONE_IF_NULL}
    for name in _CONVERSATIONS:
        if name in task:
            task[name] = _conversation(name, task[name], columns, take, is_table=row.is_text)
    if isinstance(text := task.get("messages"), str) and text:
        task["messages"] = [{"role": "user", "content": text}]
    _take_conversation(task, columns)
    if take is not None:
        _show_pictures(task, columns, take)
    if "system" in columns:
        _put_first(task, columns)
    if ("prompt" in task) == ("messages" in task):
        state = "both are there" if "prompt" in task else "neither is there"
        hint = "" if columns.keys() & {"prompt", "messages"} or "prompt" in task else _hint(task)
        for name, column in columns.items():
            if column in {"prompt", "messages"} - columns.keys() and "prompt" not in task:
                hint = f", as columns.{name}={column} has taken the column {column!r}; leave that out"
            elif near := difflib.get_close_matches(name, ("messages", "prompt"), n=1, cutoff=0.8):
                hint = hint and f"; did you mean columns.{near[0]}={column}?"
        raise ValueError(f"give either `prompt` or `messages`; {state}{hint}")
    task.setdefault("id", number)
    task |= {name: whole_number(task[name]) for name in ("id", "answer") if name in task}
    for name, check in _FIELD_CHECKS.items():
        if name in task and (expected := check(task[name])):
            hint = ""
            if name in ("prompt", "messages") and not isinstance(task[name], (list, str)):
                hint = f"; name another, columns.{name}=COLUMN (there is {', '.join(map(str, row.fields))})"
            raise ValueError(f"{_named(name, columns)} must be {expected}, got {_kind(task[name])}{hint}")
    with contextlib.suppress(ValueError):  # other tools are those of an environment that knows them
        task |= {"tools": checked_tools(task["tools"])} if "tools" in task else {}
    task = without_answer({**task, "id": str(task["id"])})
    if task.get("messages") == []:
        raise ValueError("its one message is the answer, and there is nothing it answers")
    if ANSWER in task and (messages := task.get("messages")) and messages[-1]["role"] == "assistant":
        raise ValueError("its `messages` end with two of the assistant; join them, or leave out one")
    is_rated = isinstance(task.get("label"), bool)  # then the completion may be a bad one
    completion = None if is_rated or {ANSWER, "answer"} & task.keys() else completion_of(task)
    return {**task, ANSWER: completion} if completion else task


def completion_of(task: Mapping[str, Any]) -> Message | None:
    """Return the field `completion`, if that is an answer to the task's prompt: a text, or the assistant's
    message.
    """
    completion = task.get("completion")
    if not completion:
        return None
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    if isinstance(completion, list) and isinstance(completion[0], dict) and "role" in completion[0]:
        if len(completion) == 1 and completion[0]["role"] == "assistant":
            return completion[0]
        raise ValueError(
            f"`completion` must be one message of the assistant, got {len(completion)}; put the others "
            "behind the messages of the prompt"
        )
    return None


def _put_first(task: dict[str, Any], columns: Mapping[str, str]) -> None:
    """Put what the column for `system` has before the other messages."""
    text, messages = task.get("system"), task.get("messages")
    if not isinstance(text, str | None) or not isinstance(messages, list):
        kind = _kind(text) if isinstance(messages, list) else "no `messages` to put it before"
        raise ValueError(f"{_named('system', columns)} must be a string before `messages`, got {kind}")
    if text and messages and messages[0].get("role") == "system":
        raise ValueError(f"{_named('system', columns)} and a message of the system: leave out one of them")
    if text:
        task["messages"] = [{"role": "system", "content": text}, *messages]


def _show_pictures(task: dict[str, Any], columns: Mapping[str, str], take: Callable[[Any], str]) -> None:
    """Put the pictures of the column `images` into the messages; ValueError if a picture is missing there."""
    images, messages = task.pop("images", None), task.get("messages")
    if images is not None:
        name, images = _named("images", columns), images if isinstance(images, list) else [images]
        if not isinstance(messages, list):
            raise ValueError(
                f"{name} need `messages` to be shown in, and a `prompt` goes to the model as it is; "
                "give it as `messages` (columns.messages=prompt)"
            )
        try:
            shown = with_column(messages, [take(image) for image in images])
        except PictureError as error:
            raise ValueError(f"{name}: {error}") from error
        task |= {**with_beginning(task, messages, shown), "messages": shown}
        messages = shown
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and any(part["type"] == "image" and "image" not in part for part in parts):
            raise ValueError("`messages` show a picture that is not there; name it, or give `images`")


def _conversation(
    name: str,
    value: Any,
    columns: Mapping[str, str],
    take: Callable[[Any], str] | None = None,
    *,
    is_table: bool,
) -> Any:
    """Return the messages that a value is, each in one form; the value itself if it is none."""
    if isinstance(value, str):
        try:
            read = messages_of_text(value)
            if read is None and is_table and name == "messages" and value.startswith("["):
                read = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_named(name, columns)} is not JSON: {error}") from None
        value = value if read is None else read
    if isinstance(value, dict) and value.keys() & {"role", "from"}:
        lists = [field for field in value.values() if isinstance(field, list)]
        if len(lists) == len(value) and len({len(field) for field in lists}) == 1:  # as `datasets` has them
            value = [dict(zip(value, fields, strict=True)) for fields in zip(*lists, strict=True)]
        else:
            value = [value]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return value
    checked: list[Message] = []
    for at, message in enumerate(value):
        try:
            checked.append(checked_message(message, take))
        except ValueError as error:
            if str(error).startswith("role:"):
                return value  # the check of the field says what is wanted
            raise ValueError(f"{_named(name, columns)}: {at}.{error}") from None
        if not message.keys() & {*WORDS} and checked[-1].keys() == {"role", "content"}:
            return value
    return checked


def _take_conversation(task: dict[str, Any], columns: Mapping[str, str]) -> None:
    """Leave one conversation in a task that has it more than once: turn a `prompt` of messages into
    `messages`, take those with which both `chosen` and `rejected` begin, and leave out the text that the
    messages ask with.
    """
    answers = [task.get(name) for name in ("chosen", "rejected")]
    if not {"prompt", "messages"} & task.keys() and all(isinstance(answer, str) for answer in answers):
        _take_prompt(task)
    if isinstance(task.get("prompt"), list) and "messages" not in task:
        task["messages"] = task.pop("prompt")
    elif "messages" not in task and all(isinstance(answer, list) for answer in answers):
        first, other = cast("list[list[Any]]", answers)
        common = first[: same_beginning(first, other)]
        if common or "prompt" not in task:
            task["messages"] = common
    if "prompt" in task and "messages" in task:
        question = next(
            (message["content"] for message in task["messages"] if message.get("role") == "user"), None
        )
        is_named = "messages" in columns and "prompt" not in columns
        if is_named or (isinstance(task["prompt"], str) and task["prompt"].strip() == str(question).strip()):
            del task["prompt"]


def _take_prompt(task: dict[str, Any]) -> None:
    """Take the prompt of two answers that are whole conversations in one text each, as Anthropic's: all up to
    the last turn of the assistant in what both begin with.
    """
    chosen, rejected = task["chosen"], task["rejected"]
    turn = "\n\nAssistant:"
    begin = chosen[: same_beginning(chosen, rejected)].rfind(turn)
    if begin >= 0:
        end = begin + len(turn)
        task |= {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, column in columns.items():
        try:
            values[field] = _column(fields, column)
        except KeyError:
            column_names = ", ".join(_names(fields))
            raise ValueError(
                f"nothing in the column {column!r} (columns.{field}); there is {column_names or 'none'}"
            ) from None
    other_fields = {
        name: value for name, value in fields.items() if name not in columns and name not in columns.values()
    }
    return {**other_fields, **values}


def _column(fields: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of `COLUMN.FIELD` within one; KeyError if nothing has this name."""
    if column in fields:
        return fields[column]
    first, dot, inner = column.partition(".")
    inside = fields.get(first)
    if not dot or not isinstance(inside, dict):
        raise KeyError(column)
    return _column(cast("dict[str, Any]", inside), inner)


def _names(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields, and of those within them."""
    names: list[str] = []
    for name, value in fields.items():
        inside = _names(cast("dict[str, Any]", value)) if isinstance(value, dict) else []
        names += [f"{name}.{each}" for each in inside] or [str(name)]
    return names


def name_of_answer(task: Mapping[str, Any], field: str = "answer") -> str:
    """Return how to name the column of the answer, or of another field, for people; `task` has none."""
    shown = ("id", "prompt", "messages", "tools", ANSWER)
    names = _names({name: value for name, value in task.items() if name not in shown})
    likely = [name for name in names if name.rpartition(".")[2] in _ANSWERS]
    example = (likely or ["COLUMN"])[0]
    return f"name its column, e.g. columns.{field}={example} (there is {', '.join(names) or 'none'})"


def _hint(task: Mapping[str, Any]) -> str:
    names = ", ".join(map(str, task))
    questions = [name for name in task if name in _QUESTIONS]
    likely = questions or [name for name, value in task.items() if isinstance(value, list)]
    example = f"columns.messages={likely[0]}" if likely else "columns.prompt=COLUMN"
    return f"; name its column, e.g. {example} (there is {names})" if names else ""


def _named(field: str, columns: Mapping[str, str]) -> str:
    return f"`{field}` (the column {columns[field]!r})" if field in columns else f"`{field}`"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}
    if isinstance(value, (list, str)) and not value:
        return f"an empty {'array' if isinstance(value, list) else 'string'}"
    return names.get(type(value), "a string" if isinstance(value, str) else "a number")


def whole_number(value: Any) -> Any:
    """Return a whole number as an int: a table makes floats of them where one is missing."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


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
        is_shown = isinstance(fields.get("content"), list) and bool(pictures_in([fields]))
        if not isinstance(fields.get("role"), str) or not (
            is_shown or isinstance(fields.get("content"), str)
        ):
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
