"""The environment `demonstration`: its group has one sample, the task and its answer. Nothing is generated.

So supervised fine-tuning is an iteration like any other: demonstrations are split over the nodes, written to
parts, resumed and trained as samples are. It needs a tokenizer, and no engine.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np

from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.pictures import pictures_in
from rollout.tally import warn_once
from rollout.tasks.fields import name_of_answer
from rollout.tasks.messages import ANSWER, Message, same_beginning, without_answer
from rollout.tasks.task_set import Task, TaskError, TaskSet
from rollout.trajectory import Picture, Sample

Result = TypeVar("Result")
SAID = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
"""The fields of a message that its sender has said; others are about it."""
TRAINED = ("weight", "train", "training", "trainable", "loss")
"""What data sets call the field, a number or a boolean, that says whether a message is trained on."""
_OPENED = re.compile(r"<(\w+)>\s*$")
"""What a chat template may open before an answer."""


async def demonstration(
    task: Task,
    policy: Policy,
    sampling: Sampling,
    end_ids: Sequence[int] = (),
    context: int | None = None,
    vocabulary: int | None = None,
) -> list[Sample]:
    """Make one sample with reward 1 (`sampling.n` is ignored): prompt, answer, end of the sequence. The last
    two are trained. Their logprobs are NaN, because nothing sampled them.

    The answer is the message of the assistant that the task's conversation ended with (all of it, rendered by
    the chat template), else the field `answer`. The prompt's tokens are those that sampling would go on from,
    with all that the template puts before an answer (a thinking model's `<think>`). What the whole
    conversation has behind that follows, or the answer's own words, if the template leaves out some of them
    there. The trained tokens end with
    the first token in `end_ids`, or with `end_ids[0]` if the template writes none. Raises TaskError, which
    names the task, if the answer is missing or longer than `sampling.max_tokens`, if it holds the mark of an
    end or the chat template leaves a part of it out, or if the whole is longer than `context` or
    has a token beyond the `vocabulary`.
    """
    answer, limits = demonstrated(task), (end_ids, context, vocabulary)
    return [await written(task, answer, policy, sampling.max_tokens, *limits)]


demonstration.demonstrates = True  # pyright: ignore[reportFunctionMemberAccess]  (see Environment)


async def written(
    task: Task,
    answer: Message,
    policy: Policy,
    max_tokens: int,
    end_ids: Sequence[int],
    context: int | None = None,
    vocabulary: int | None = None,
) -> Sample:
    """Return the sample that answers a task with a message; see `demonstration`."""
    if not end_ids:
        raise ValueError("the model names no end-of-sequence token, so its demonstrations would have no end")
    prompt, with_answer = await _rendered(task, answer, policy.for_task(task))
    common = same_beginning(prompt, with_answer)
    answer_ids = with_answer[common:]
    end = next((token for token in answer_ids if token in end_ids), end_ids[0])
    words = await policy.tokenize(answer["content"])
    if any(token in end_ids for token in words[:-1]):
        raise TaskError(
            f"task {task['id']!r}: its answer holds a mark that ends a sequence, and what follows would not "
            "be learnt; take the mark out of the words"
        )
    if common < len(prompt):
        answer_ids = await _behind_opened(prompt, with_answer, common, answer, policy)
    trained = [*takewhile(lambda token: token not in end_ids, answer_ids), end]
    shown = pictures_in(messages_before(task)) if "messages" in task else []
    prompt, pictures = await policy.expanded(prompt, shown)
    if len(trained) > max_tokens:
        raise TaskError(
            f"task {task['id']!r}: its answer has {len(trained)} tokens with the end of the sequence, more "
            f"than rollout.max_tokens={max_tokens}; raise that, or leave the task out"
        )
    tokens = len(prompt) + len(trained)
    if context is not None and tokens > context:
        raise TaskError(
            f"task {task['id']!r}: it has {tokens} tokens with its answer, and beyond {context} this model "
            "has no positions, or computes them otherwise; leave the task out"
        )
    check_vocabulary(task, [*prompt, *trained], vocabulary)
    return _sample(prompt, trained, said_by(answer), pictures)


def check_vocabulary(task: Task, token_ids: Sequence[int], vocabulary: int | None) -> None:
    """Raise TaskError for a token that the model has no place for."""
    if vocabulary is not None and (beyond := [token for token in token_ids if token >= vocabulary]):
        raise TaskError(
            f"task {task['id']!r}: it has the token {beyond[0]}, and the model knows {vocabulary}: its "
            "tokenizer has more; take a tokenizer that belongs to the model, or leave the task out"
        )


async def _behind_opened(
    prompt: list[int], with_answer: list[int], common: int, answer: Message, policy: Policy
) -> list[int]:
    """Return the tokens of an answer behind a prompt that opens what the whole conversation, which has
    `common` tokens with it, closes at once, leaves out, or has in other tokens.
    """
    asked_text, whole_text = [await policy.detokenize(tokens) for tokens in (prompt, with_answer)]
    same = same_beginning(asked_text, whole_text)
    text, is_plain = whole_text[same:], answer.keys() <= {"role", "content"}
    closes = same == len(asked_text) or _OPENED.search(asked_text[:same])
    if closes and (not is_plain or answer["content"].strip() in text):
        tokens = await policy.tokenize(text)
    elif is_plain:
        text, opened = answer["content"], prompt[common:]
        tokens = await policy.tokenize(text)
        if tokens[: len(opened)] == opened:  # the answer too begins with what the template opens
            tokens = tokens[len(opened) :]
    else:
        tokens = with_answer[common:]
    if (mark := _OPENED.search(asked_text)) and f"</{mark[1]}>" not in text:
        warn_once(
            f"open {mark[1]}",
            f"the model's chat template opens <{mark[1]}> before an answer, and neither it nor an answer to "
            f"train on closes that, so the model learns to answer within; begin answers with </{mark[1]}>",
        )
    return tokens


async def _rendered(task: Task, answer: Message, policy: Policy) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and of the whole conversation with the answer. Raises TaskError if a
    part of the answer is in neither.
    """
    more = [name for name in answer if name not in ("role", "content")]
    if "prompt" in task:
        if more:
            raise TaskError(
                f"task {task['id']!r}: its answer has `{more[0]}`, which no text can say; give `messages` in "
                "place of `prompt`"
            )
        prompt = task["prompt"]
        return await policy.tokenize_whole(prompt), await policy.tokenize_whole(prompt + answer["content"])
    messages = messages_before(task)
    with_answer = await policy.tokenize_whole([*messages, answer])
    for name in [name for name in ("content", *more) if more and answer[name]]:
        less = (
            {**answer, name: ""}
            if name == "content"
            else {key: answer[key] for key in answer.keys() - {name}}
        )
        if await policy.tokenize_whole([*messages, less]) != with_answer:
            continue
        if name not in SAID:
            warn_once(f"left out {name}", f"the model's chat template leaves out `{name}` of messages")
            continue
        raise TaskError(
            f"task {task['id']!r}: the model's chat template leaves out `{name}` of its answer, which would "
            "not be learnt; take a model whose template writes it, write it into `content`, or leave it out"
        )
    return await policy.tokenize(messages), with_answer


def check_demonstrations(tasks: TaskSet) -> None:
    """Raise TaskError, which names the task and its place, if a task has no answer to demonstrate."""
    check_each(tasks, demonstrated)


def check_each(tasks: TaskSet, check: Callable[[Task], Result]) -> list[Result]:
    """Return what `check` returns for each task. A TaskError of it is raised with the place of the task."""
    results: list[Result] = []
    for index, task in enumerate(tasks.tasks):
        try:
            results.append(check(task))
        except TaskError as error:
            raise TaskError(f"{tasks.place(index)}: {error}") from None
    return results


def demonstrated(task: Task) -> Message:
    """Return the answer that the task demonstrates."""
    answer = without_answer(task).get(ANSWER) or {"role": "assistant", "content": str(task.get("answer", ""))}
    if not any(answer.get(name) for name in SAID):
        raise TaskError(
            f"task {task['id']!r} has no answer to demonstrate: give it an `answer`, or `messages` that end "
            f"with the assistant's, or {name_of_answer(task)}"
        )
    if "messages" in task and not messages_before(task):
        raise TaskError(
            f"task {task['id']!r}: its one message is the answer, and there is nothing it answers"
        )
    weights = {name: answer[name] for name in TRAINED if isinstance(answer.get(name), int | float)}
    for name, weight in weights.items():
        if weight != 1:
            raise TaskError(
                f"task {task['id']!r}: its last message, which is trained on, has `{name}` {weight}, not 1; "
                "end the conversation with a message to learn, or leave the task out"
            )
    return {name: value for name, value in answer.items() if name not in weights}


def messages_before(task: Task) -> list[Message]:
    """Return the messages of a task without an answer at their end."""
    return without_answer(task)["messages"]


def said_by(message: Message) -> str:
    """Return the text of a message, for people: its words, or its other fields where it has none."""
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    return message["content"] or json.dumps(more, ensure_ascii=False)


def _sample(prompt_ids: list[int], trained: list[int], text: str, pictures: list[Picture]) -> Sample:
    loss_mask = np.zeros(len(prompt_ids) + len(trained), dtype=np.uint8)
    loss_mask[len(prompt_ids) :] = 1
    return Sample(
        token_ids=np.array(prompt_ids + trained, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask == 1, np.nan, 0).astype(np.float32),
        finish_reason="stop",
        text=text,
        reward=1.0,
        pictures=pictures,
    )
