"""Chat messages and tools as people and APIs write them, brought into one form. Pure."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.pictures import is_digest

Message = dict[str, Any]
"""`role`, `content`, and other fields of the model's chat template (`tool_call_id`, `name` ...)."""
Task = dict[str, Any]
ANSWER = "answer_message"
"""The field of a task with the assistant's message that its conversation ended with."""
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant"),
    "function": "tool",
}
"""Roles of chat templates by what data sets call them, in small letters."""
_SHARE_GPT = {**_ROLES, **dict.fromkeys(("observation", "function_response", "tool_response"), "tool")}
"""Roles by what `from` calls them, where messages are written as {"from": ..., "value": ...}."""
WORDS = ("content", "value", "text", "parts")
"""What data sets call the words of a message, the last as Gemini's API does."""
_TEXTS = ("text", "input_text", "output_text", None)
"""Types of the parts of a content that are its words."""
_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""What data sets call the arguments of a call."""
_WITH_WORDS = ("system", "developer", "user")
"""Roles whose messages are nothing without words."""
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|from|content|value)['"]""")


def checked_message(message: Any, take: Callable[[Any], str] | None = None) -> Message:
    """Return a message in one form: its content as one string, its calls as the OpenAI API has them, no empty
    fields. ValueError, which begins with the name of the field, says what is wrong.

    `take` returns the digest of a picture; with it the content may show some, and then it is a list of parts.
    """
    if isinstance(message, Mapping) and isinstance(message.get("from"), str) and "role" not in message:
        message = _of_share_gpt(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("role: must be a string")
    message = {**message, "role": _ROLES.get(message["role"].lower(), message["role"])}
    words = next((name for name in WORDS if name in message), "content")
    content = message.pop(words, None)
    if isinstance(content, list) and take and any(map(_is_picture, content)):
        if message["role"] not in ("user", "tool"):
            raise ValueError(
                f"content: a picture in a message of the {message['role']}; give it to the user's or a tool's"
            )
        content = [_checked_part(part, take) for part in content]
    elif isinstance(content, list):
        if not all(map(_is_text, content)):
            raise ValueError(
                "content: only parts of the type text are supported; reasoning is the field "
                "`reasoning_content`, a call one of `tool_calls`"
            )
        content = "".join(part["text"] for part in content)
    elif not isinstance(content, str | None):
        raise ValueError("content: must be a string or parts of the type text")
    if message.get("prefix") is True and message["role"] == "assistant":
        raise ValueError("prefix: no answer is begun here; give a `prompt` that ends with its beginning")
    if content is None and message["role"] in _WITH_WORDS:
        raise ValueError(f"content: a message of the {message['role']} must have words; leave it out")
    filled = {name: value for name, value in message.items() if value not in (None, [], {})}
    if (called := filled.pop("function_call", None)) and "tool_calls" not in filled:
        filled["tool_calls"] = [called]  # as the OpenAI API had it
    if "tool_calls" in filled:
        filled["tool_calls"] = _checked_calls(filled["tool_calls"])
    return {**filled, "content": content or ""}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") in _TEXTS


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def with_digests(messages: Sequence[Message], take: Callable[[Any], str]) -> Sequence[Message]:
    """Return messages whose pictures are named by the digests that `take` returns: the same ones if they are
    already. Raises ValueError, as `checked_message`.
    """
    named = [checked_message(message, take) if has_unnamed(message) else message for message in messages]
    if any(map(has_unnamed, named)):
        raise ValueError("content: a part of the type image shows none; give it as `image`")
    return named


def has_unnamed(message: Message) -> bool:
    """Return whether a message shows a picture that is not yet named by its digest."""
    content = message.get("content")
    parts = filter(_is_picture, content) if isinstance(content, list) else ()
    return any(not is_digest(part.get("image")) for part in parts)


def _checked_part(part: Any, take: Callable[[Any], str]) -> dict[str, str]:
    """Return a part of a content that shows pictures: a text, or the digest of a picture; without a digest if
    the picture is in the column `images`.
    """
    if not _is_picture(part):
        if not _is_text(part):
            raise ValueError("content: only parts of the types text, image and image_url are supported")
        return {"type": "text", "text": part["text"]}
    values = (part.get(name) for name in ("image", "image_url", "url", "path"))
    value = next(filter(_is_given, values), None)
    if value is None:
        return {"type": "image"}
    try:
        return {"type": "image", "image": take(value)}
    except ValueError as error:
        raise ValueError(f"content: {error}") from error


def _is_given(value: Any) -> bool:
    return value is not None and (bool(value) if isinstance(value, str | bytes | dict) else True)


def _of_share_gpt(message: Mapping[str, Any]) -> Message:
    """Return a message that says who it is `from`, with a `role`."""
    sender = message["from"].lower()
    more = {name: value for name, value in message.items() if name not in ("from", "value")}
    if sender == "function_call":
        return {**more, "role": "assistant", "content": "", "tool_calls": message.get("value")}
    if sender not in _SHARE_GPT:
        raise ValueError(f"from: must be {', '.join(_SHARE_GPT)} or function_call, got {sender!r}")
    return {"content": message.get("value"), **more, "role": _SHARE_GPT[sender]}


def _checked_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the calls of a message without fields that clients add, and the arguments in one form."""
    checked: list[dict[str, Any]] = []
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        for call in [calls] if isinstance(calls, dict) else calls:
            call = json.loads(call) if isinstance(call, str) else call
            function = call.get("function") or call
            id = {"id": str(call["id"])} if call.get("id") else {}
            values = next((function[name] for name in _ARGUMENTS if function.get(name)), None)
            arguments = json.dumps(_arguments(values), ensure_ascii=False)
            called = {"name": str(function["name"]), "arguments": arguments}
            checked.append({**id, "type": "function", "function": called})
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            "tool_calls: must be a list of calls, each with `id` and a `function` with `name` and "
            "`arguments`, a JSON object or the text of one"
        ) from error
    return checked


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, none if nothing is there."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else None
    if not isinstance(arguments, dict | None):
        raise TypeError(arguments)
    return arguments or {}


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools as the OpenAI API has them, of a list of them, of their functions alone (as Anthropic's
    API and MCP have them, too), or of the JSON text of any. Raises ValueError for anything else.
    """
    try:
        listed = json.loads(tools) if isinstance(tools, str) else tools
        listed = [json.loads(tool) if isinstance(tool, str) else tool for tool in listed]
        functions = [_without_nulls(tool.get("function") or tool) for tool in listed]
        for function in functions:
            for name in ("input_schema", "inputSchema"):
                if name in function:
                    function.setdefault("parameters", function.pop(name))
        if all(isinstance(function["name"], str) for function in functions):
            return [{"type": "function", "function": function} for function in functions]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        pass
    raise ValueError("must be a list of functions, each with a `name`, as in the OpenAI API")


def _without_nulls(schema: Any) -> Any:
    """Return a schema without fields that are null: a table gives all rows the fields that one has."""
    if isinstance(schema, list):
        return [_without_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    without_nulls = {
        name: value for name, value in schema.items() if value is not None or name in ("default", "const")
    }
    return {name: _without_nulls(value) for name, value in without_nulls.items()}


def messages_of_text(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON, or as Python prints them, which is how tables are often
    saved; None if it does not look like messages. ValueError if it does, and cannot be read.
    """
    if _LOOKS_LIKE_MESSAGES.match(text) is None:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list) else None
    raise ValueError("looks like messages, but is not JSON")


def without_answer(task: Task) -> Task:
    """Return a task whose messages do not end with the assistant's: such a message is what the conversation
    answers, so it is the field ANSWER instead, and no prompt shows it.
    """
    messages = task.get("messages")
    if not messages or messages[-1].get("role") != "assistant":
        return task
    return {**task, "messages": messages[:-1], ANSWER: messages[-1]}


def answer_of(task: Task) -> Any:
    """Return the field `answer` of a task; without one, the words that its messages ended with, or None."""
    return task["answer"] if "answer" in task else task.get(ANSWER, {}).get("content") or None


def with_system_prompt(task: Task, text: str | None) -> Task:
    """Return a task whose conversation begins with a system message: its own, else one of this text. Raises
    ValueError for a task that is no conversation.
    """
    if text is None:
        return task
    if "messages" not in task:
        raise ValueError(
            "rollout.system_prompt begins conversations, and this is a `prompt`, which goes to the model as "
            "it is; give it as `messages` (columns.messages=prompt), or leave rollout.system_prompt out"
        )
    messages = task["messages"]
    if any(message.get("role") in ("system", "developer") for message in messages):
        return task
    system = {"role": "system", "content": text}
    begun = [system, *messages]
    return {**task, **with_beginning(task, messages, begun), "messages": begun}


def with_beginning(task: Task, before: list[Message], now: list[Message]) -> dict[str, list[Message]]:
    """Return the answers of a task that are whole conversations and begin with its messages as they were
    `before`, with these as they are `now`.
    """
    return {
        name: [*now, *task[name][len(before) :]]
        for name in ("chosen", "rejected")
        if isinstance(task.get(name), list) and before and task[name][: len(before)] == before
    }


def same_beginning(first: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many elements two sequences begin with both."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(other)))
