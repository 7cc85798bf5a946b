"""What is said to the model and by it: as tokens in a sample, and as turns for people to read."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeIs

from rollout.engines.completion import Completion
from rollout.pictures import pictures_in, shown_text
from rollout.tasks.messages import Message, without_answer
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample, Turn

Messages = Sequence[Message]
Prompt = str | Sequence[int] | Messages
"""Text, token ids, or chat messages."""


def sample_of(*turns: Completion) -> Sample:
    """Return the sample of one completion, or of several turns. The prompt of a turn is prompt and completion
    of the turn before, then an observation. Observations get loss mask 0. The text is the last turn's. Raises
    ValueError if a prompt does not continue the turn before, i.e. if text was tokenised again, or if a turn
    has not a logprob for each token. With tools, the metric `unread_calls` counts what could not be read.
    """
    last = turns[-1]
    unread = [turn.unread_calls for turn in turns if turn.unread_calls is not None]
    token_ids = last.prompt_ids + last.token_ids
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for number, turn in enumerate(turns):
        begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        if token_ids[:end] != turn.prompt_ids + turn.token_ids:
            raise ValueError(
                f"turn {number} is not continued by the prompt of the last: append token ids, not text"
            )
        if len(turn.token_ids) != len(turn.logprobs):
            raise ValueError(f"a turn has {len(turn.token_ids)} token ids, but {len(turn.logprobs)} logprobs")
        loss_mask[begin:end] = 1
        logprobs[begin:end] = turn.logprobs
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        text=last.text,
        metrics={"unread_calls": float(sum(unread))} if unread else {},
        turns=[shown for turn in turns for shown in (*turn.turns_before, _generated(turn))],
        pictures=[*last.pictures],
        routes=_routes(turns, len(token_ids)),
    )


def _routes(turns: Sequence[Completion], tokens: int) -> NDArray[np.int16] | None:
    """(tokens, ...) routes of each token by the turn that has read it first; None if no turn has any."""
    all_routes, known = None, 0
    for routes in (turn.routes for turn in turns if turn.routes is not None):
        all_routes = np.full((tokens, routes.shape[1]), -1, np.int16) if all_routes is None else all_routes
        all_routes[known : len(routes)] = routes[known:]
        known = len(routes)
    return all_routes


def opening(task: Task) -> str | list[Message]:
    """Return the beginning of a task's conversation: its prompt, or its messages, without an answer at the
    end of them.
    """
    return task["prompt"] if "prompt" in task else without_answer(task)["messages"]


def turns_of(prompt: Prompt) -> list[Turn]:
    """Return the turns of a prompt, for people to read."""
    if isinstance(prompt, str):
        return [Turn("environment", prompt)] if prompt else []
    if is_chat(prompt):
        return [Turn(str(message.get("role")), _content(message)) for message in prompt]
    return [Turn("environment", f"[{len(prompt)} token ids]")] if prompt else []


def _generated(turn: Completion) -> Turn:
    begin = len(turn.prompt_ids)
    end = begin + len(turn.token_ids)
    return Turn("assistant", turn.text + turn.stop_string, begin, end, turn.finish_reason)


def _content(message: Message) -> str:
    """Return the text of a message, with its other fields (e.g. `tool_calls`) as JSON."""
    more = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    content = message.get("content") or ""
    text = shown_text(content) if isinstance(content, str) or pictures_in([message]) else json.dumps(content)
    return "\n".join(filter(None, [text, json.dumps(more) if more else ""]))


def is_chat(prompt: Prompt) -> TypeIs[Messages]:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
