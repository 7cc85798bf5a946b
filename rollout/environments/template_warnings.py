"""Warn of what a model's chat template does without a word: it leaves out parts of messages, or ends an
answer with a mark at which no engine stops.
"""

from collections.abc import Iterator, Sequence

from rollout.engines.answers import RequestRefused
from rollout.engines.special_tokens import SpecialTokens
from rollout.environments.demonstration import SAID
from rollout.environments.policy import Policy
from rollout.environments.turns import opening
from rollout.tasks.messages import Message, same_beginning
from rollout.tasks.task_set import Task, TaskSet

_FIELDS = (*SAID[1:], "name")
"""Fields of a message, beside its content, that are meant for the model."""


async def template_warnings(
    tasks: TaskSet, shown: Sequence[int], policy: Policy, special_tokens: SpecialTokens, is_written: bool
) -> list[str]:
    """Return the warnings about the chat template of the policy's model, tried with the tasks `shown`.
    `policy` has the settings' stop strings. `is_written`: the run trains on given answers, no stop ends one.
    """
    warnings: list[str] = []
    first: dict[str, int] = {}
    for index in shown:
        for part in await _parts_left_out(tasks.tasks[index], policy):
            first.setdefault(part, index)
    counted = [f"{part} (in {sum(_has(task, part) for task in tasks.tasks)} tasks)" for part in first]
    if counted:
        warnings.append(
            f"{tasks.place(min(first.values()))}: the model's chat template leaves out {', '.join(counted)}; "
            "the model reads what is in `content`"
        )
    if mark := await _mark_without_end(policy, special_tokens):
        setting = "" if is_written else f"give rollout.stop='[\"{mark}\"]', or "
        warnings.append(
            f"the model's chat template ends an answer with {mark}, which neither the tokenizer nor a "
            f"configuration calls an end of sequence; {setting}add its id, {special_tokens.ids[mark]}, to "
            "eos_token_id in generation_config.json"
        )
    return warnings


async def _parts_left_out(task: Task, policy: Policy) -> list[str]:
    """Return which parts of the task's messages change nothing in its prompt, e.g. `name` of user messages.

    Tools are none of them: a template that knows no tools is an error.
    """
    messages = opening(task)
    if isinstance(messages, str):
        return []
    policy = policy.for_task(task)
    prompt = await policy.tokenize(messages)
    parts: list[str] = []
    for part in dict.fromkeys(part for message in messages for part in _parts(message)):
        without = [less for message in messages if (less := _without(part, message))]
        try:
            if without and await policy.tokenize(without) == prompt:
                parts.append(part)
        except RequestRefused:
            continue  # so the template reads it
    return parts


def _has(task: Task, part: str) -> bool:
    """Return whether one of the task's messages has a part as _parts_left_out names it."""
    messages = opening(task)
    return not isinstance(messages, str) and any(part in _parts(message) for message in messages)


def _parts(message: Message) -> Iterator[str]:
    role = message["role"]
    if role not in ("user", "assistant"):
        yield f"{role} messages"
    for name in _FIELDS:
        if message.get(name) and (name, role) != ("name", "tool"):  # that is known from the call
            yield f"`{name}` of {role} messages"
    if message.get("content") and message.get("tool_calls"):
        yield f"`content` of {role} messages with calls"


def _without(part: str, message: Message) -> Message | None:
    """Return a message without the part; None if the part is the whole message."""
    if part not in _parts(message):
        return message
    if not part.startswith("`"):
        return None
    name = part.split("`")[1]
    return (
        {**message, "content": ""} if name == "content" else {k: v for k, v in message.items() if k != name}
    )


async def _mark_without_end(policy: Policy, special_tokens: SpecialTokens) -> str | None:
    """Return the special token that the chat template writes behind an answer, if it writes one and nothing
    there ends a generation; else None.
    """
    question: Message = {"role": "user", "content": "0"}
    try:
        first, other = [
            await policy.tokenize_whole([question, {"role": "assistant", "content": c}]) for c in "01"
        ]
    except RequestRefused:
        return None
    ending = first[len(first) - same_beginning(first[::-1], other[::-1]) :]
    if {*special_tokens.end_ids, *special_tokens.stop_ids(policy.sampling.stop)} & {*ending}:
        return None
    texts = {token: text for text, token in special_tokens.ids.items()}
    return next((texts[token] for token in ending if token in texts), None)
