"""Look at the start at what the tasks of a run become as tokens: what the model cannot take is an error that
names the task, and what hardly anybody means is a warning.

Few tasks are rendered: one of each shape, and those that may be too long or hold a token that the model
lacks.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.model_facts import most_tokens, placeholder, template_text, vocabulary_size
from rollout.engines.special_tokens import read_special_tokens
from rollout.environments.chat import EXAMPLE_TOOL
from rollout.environments.policy import Policy
from rollout.environments.prompts import prompt_of
from rollout.environments.template_warnings import template_warnings
from rollout.origin import Sampling
from rollout.settings import WRITTEN
from rollout.tasks.messages import ANSWER
from rollout.tasks.task_set import Task, TaskError, TaskSet

_MOST_SHAPES = 16
_FOR_THE_MODEL = {
    "system": "columns.system=system puts it before the messages",
    "system_prompt": "columns.system=system_prompt puts it before the messages",
    **dict.fromkeys(
        (
            *("instruction", "input", "context", "history", "functions"),
            *("function", "available_tools", "starter_code", "choices", "options", "passage", "documents"),
        ),
        "write it into the messages if it should",
    ),
}
"""Fields of a task that are no part of its prompt, though data sets mean them for the model: what to do."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_MARKS_OF_TURN = 64
"""More tokens than a chat template writes around a message."""
_ANSWERS = ("answer", "chosen", "rejected", "completion")


@dataclass
class _TaskScan:
    """What is looked for in the texts of a task set, and what was found."""

    special_tokens: dict[int, str]
    context: int | None
    """How many tokens a sample may have at most for all that read it."""
    lacking: list[str]
    """Added tokens that the tokenizer has and the model has not."""
    lacks_words: bool
    """Whether it lacks tokens that were not added: any text may have them."""
    template: str
    """All text that may be a chat template of the model."""
    placeholder: str | None
    """What stands for a picture, which words cannot write."""
    shapes: dict[Any, int] = field(default_factory=dict)
    suspects: list[int] = field(default_factory=list)
    odd_roles: set[str] = field(default_factory=set)
    in_place: list[int] = field(default_factory=list)
    """The tasks that hold the placeholder in their words."""
    in_words: dict[str, list[int]] = field(default_factory=dict)
    """By mark: the tasks with messages that hold it in their words."""


def try_tasks(
    tasks: TaskSet,
    environment: str,
    model_dir: Path,
    sampling: Sampling,
    tokenizer: EngineClient,
    longest: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """Return warnings about the tokens of tasks, which the environment (a built-in one) shows or gives.
    Raises TaskError, which names the task, for one that the model cannot take. `longest`: how many tokens a
    sample may have, by what reads samples.
    """
    known, rows = read_special_tokens(model_dir), vocabulary_size(model_dir)
    most_of_model = most_tokens(model_dir)
    contexts = [*longest.values(), *([] if most_of_model is None else [most_of_model])]
    special_tokens = {token: text for text, token in known.ids.items()}
    most = math.inf if rows is None else rows
    added, template = {**known.ids, **known.not_special}, template_text(model_dir)
    lacking = [text for text, token in added.items() if token >= most]
    place = placeholder(model_dir)
    picture = next((text for text, token in added.items() if token == place), None)
    look = _TaskScan(
        special_tokens, min(contexts, default=None), lacking, known.words > most, template, picture
    )
    _look(tasks.tasks, look)
    if look.in_place:
        raise TaskError(
            f"{tasks.place(look.in_place[0])}: its words hold {picture}, which stands for a picture in this "
            "model, and no picture is there; give the picture in `images`, or take it out of the words"
        )
    warnings = [
        f"{tasks.place(those[0])}: its words hold {mark}, which the tokenizer reads as a special token"
        + (f"; so do those of {len(those) - 1} other tasks" if len(those) > 1 else "")
        for mark, those in look.in_words.items()
    ]
    warnings += _unseen(tasks)
    limits = {"end_ids": known.end_ids, "context": most_of_model, "vocabulary": rows}

    async def render() -> None:
        shown = list(look.shapes.values())
        for index in dict.fromkeys([*shown, *look.suspects]):
            task = tasks.tasks[index]
            policy = Policy(tokenizer, sampling, 0)
            try:
                room = min(longest.values(), default=None)
                prompt, tokens = await prompt_of(task, environment, policy, limits, room)
                _check_length(task, tokens, longest)
            except (TaskError, RequestRefused) as error:
                text = str(error).removeprefix(f"task {task['id']!r}: ").removeprefix(f"task {task['id']!r} ")
                raise TaskError(f"{tasks.place(index)}: task {task['id']!r}: {text}") from None
            if index in shown:
                warnings.extend(f"{tasks.place(index)}: {text}" for text in _odd(task, prompt, look, limits))
        is_chat = environment == "python" or any("messages" in task for task in tasks.tasks)
        if is_chat:
            policy = Policy(tokenizer, sampling, 0)
            warnings.extend(await template_warnings(tasks, shown, policy, known, environment in WRITTEN))

    asyncio.run(render())
    return list({text.partition(": ")[2]: text for text in reversed(warnings)}.values())[::-1]


def why_no_tools(sampling: Sampling, tokenizer: EngineClient) -> str | None:
    """Return why no conversation with the tokenizer's model can have tools; None if one can."""
    policy = Policy(tokenizer, sampling, 0).with_tools([EXAMPLE_TOOL])
    try:
        asyncio.run(policy.tokenize([{"role": "user", "content": "0"}]))
    except RequestRefused as error:
        return str(error)
    return None


def _unseen(tasks: TaskSet) -> Iterator[str]:
    """Yield a warning for each part of the tasks that is meant for the model, and does not reach it so."""
    fields: dict[str, int] = {}
    roles: dict[str, int] = {}
    for index, task in enumerate(tasks.tasks):
        messages = task.get("messages", ())
        has_system = any(message["role"] == "system" for message in messages)
        for name in _FOR_THE_MODEL.keys() & task.keys():
            if task[name] and not (has_system and name.startswith("system")):
                fields.setdefault(name, index)
        for message in messages:
            if message["role"] not in _ROLES:
                roles.setdefault(message["role"], index)
    for name, index in sorted(fields.items()):
        yield f"{tasks.place(index)}: the model does not see the field `{name}`; {_FOR_THE_MODEL[name]}"
    for role, index in sorted(roles.items()):
        yield (
            f"{tasks.place(index)}: has a message of {role!r}, a role that few chat templates know; an "
            "answer that should not be shown must be of the assistant"
        )


def _look(tasks: Sequence[Task], look: _TaskScan) -> None:
    """Find the tasks to render: the first of each shape, and those that the model may not be able to take."""
    mark = re.compile("|".join(map(re.escape, look.special_tokens.values())) or "(?!)")
    for index, task in enumerate(tasks):
        messages = [*task.get("messages", ()), *([task[ANSWER]] if ANSWER in task else [])]
        lists = [answer for name in _ANSWERS if isinstance(answer := task.get(name), list)]
        messages += [message for answer in lists for message in answer if isinstance(message, dict)]
        words = [str(message.get("content", "")) for message in messages]
        answers = [str(task[name]) for name in _ANSWERS if name in task]
        inside = [*words, *(re.sub(f"({mark.pattern})\\s*\\Z", "", answer) for answer in answers)]
        for text in {shown for word in inside for shown in mark.findall(word)}:
            look.in_words.setdefault(text, []).append(index)
        fields = [str(task[name]) for name in ("prompt", *_ANSWERS) if name in task]
        holds = frozenset(mark.findall(str(task.get("prompt", ""))))
        shape = (holds, bool(task.get("tools")), frozenset((m.get("role"), *sorted(m)) for m in messages))
        if shape not in look.shapes and len(look.shapes) < _MOST_SHAPES:
            look.shapes[shape] = index
        if look.placeholder and any(
            look.placeholder in text for text in [*words, *fields, str(task.get("tools", ""))]
        ):
            look.in_place.append(index)
        odd_roles = {message["role"] for message in task.get("messages", ())} - _ROLES - look.odd_roles
        look.odd_roles |= odd_roles
        is_long = look.context is not None and _most_tokens(task, messages, fields) > look.context
        if (
            is_long
            or odd_roles
            or look.lacks_words
            or any(token in text for token in look.lacking for text in [*words, *fields])
        ):
            look.suspects.append(index)


def _most_tokens(task: Task, messages: Sequence[Any], fields: Sequence[str]) -> int:
    """Return a number of tokens that a task has at most with an answer, whatever the tokenizer: a token is a
    byte or more.
    """
    most = sum(len(text.encode()) for text in [*map(str, messages), *fields])
    return most + _MARKS_OF_TURN * (1 + len(messages)) + len(str(task.get("tools", "")))


def longer_prompts(
    tasks: TaskSet,
    environment: str,
    model_dir: Path,
    sampling: Sampling,
    tokenizer: EngineClient,
    longest: int,
) -> dict[int, int]:
    """Return how many tokens, or more, prompts that have more than `longest` have, by the index of the task.
    Raises TaskError, which names the task, for one that the model cannot take.
    """
    limits = {"end_ids": read_special_tokens(model_dir).end_ids, "context": None, "vocabulary": None}
    lengths: dict[int, int] = {}
    template: dict[bool, int] = {}  # by whether tools are shown: more than it writes by itself

    async def count() -> None:
        for index, task in enumerate(tasks.tasks):
            has_tools = bool(task.get("tools"))
            texts = [str(task[name]) for name in ("prompt", "answer") if name in task]
            most = _most_tokens(task, task.get("messages", ()), texts) + template.get(has_tools, longest)
            if most <= longest:
                continue
            try:
                policy = Policy(tokenizer, sampling, 0)
                prompt, _ = await prompt_of(task, environment, policy, limits, longest)
            except (TaskError, RequestRefused) as error:
                raise TaskError(f"{tasks.place(index)}: {error}") from None
            template.setdefault(has_tools, len(prompt))
            if len(prompt) > longest:
                lengths[index] = len(prompt)

    asyncio.run(count())
    return lengths


def _check_length(task: Task, tokens: int, longest: Mapping[str, int]) -> None:
    """Raise TaskError if something that reads samples has no room for so many tokens."""
    for reader, most in longest.items():
        if tokens > most:
            raise TaskError(
                f"task {task['id']!r}: its samples have {tokens} tokens or more, and {reader} has room for "
                f"{most}; leave the task out, as rollout.max_prompt_tokens does with long prompts of --tasks"
            )


def _odd(task: Task, prompt: Sequence[int], look: _TaskScan, limits: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for each oddity of the special tokens of a prompt."""
    special, ends = look.special_tokens, limits["end_ids"]
    first = [token for token in prompt[:4] if token in special]
    doubled = next((token for token, other in pairwise(prompt) if token == other and token in special), None)
    if doubled is None and len(first) > 1 and first[0] == first[1]:
        doubled = first[0]
    if doubled is not None:
        yield (
            f"its prompt has {special[doubled]} twice: the tokenizer or the chat template writes it too; "
            "leave it out of one of them"
        )
    if prompt and prompt[-1] in ends:
        yield f"its prompt ends with {special.get(prompt[-1], prompt[-1])}, the end of a sequence"
    elif "prompt" in task:
        inside = next((token for token in prompt if token in ends and token in special), None)
        if inside is not None and not (special[inside] in look.template or "eos_token" in look.template):
            yield f"its prompt holds {special[inside]}, the end of a sequence, which no chat template writes"
