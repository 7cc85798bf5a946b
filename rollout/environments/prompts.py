"""The prompts that tasks become as tokens, as their environment shows them to a model."""

import asyncio
from pathlib import Path
from typing import Any

from rollout.engines.client import EngineClient
from rollout.engines.special_tokens import read_special_tokens
from rollout.environments.demonstration import check_vocabulary, demonstration
from rollout.environments.labelled import labelled
from rollout.environments.policy import Policy
from rollout.environments.preference import preference
from rollout.environments.turns import opening
from rollout.origin import Sampling
from rollout.tasks.task_set import Task, TaskSet

_UNLIMITED = 2**31
_CHARACTERS, _FAR_MORE = 8, 1.25
"""Characters for each token that there is room for, which have more tokens in nearly all texts."""
_WRITTEN: dict[str, Any] = {
    "demonstration": demonstration,
    "preference": preference,
    "labelled": labelled,
}


def rendered_prompt(
    tasks: TaskSet, environment: str, model_dir: Path, sampling: Sampling, tokenizer: EngineClient
) -> tuple[int, str]:
    """Return how many tokens the first task's prompt has, and its text with all special tokens."""
    limits = {"end_ids": read_special_tokens(model_dir).end_ids, "context": None, "vocabulary": None}

    async def render() -> tuple[int, str]:
        prompt, _ = await prompt_of(tasks.tasks[0], environment, Policy(tokenizer, sampling, 0), limits)
        return len(prompt), await tokenizer.detokenize(prompt)

    return asyncio.run(render())


async def prompt_of(
    task: Task, environment: str, policy: Policy, limits: dict[str, Any], room: int | None = None
) -> tuple[list[int], int]:
    """Return the tokens of a task's prompt, and how many a sample of it has at least. Where more than `room`
    are too many, and a beginning of its texts has far more, they are those of that: megabytes take minutes.
    Raises TaskError or RequestRefused if it has none, or an answer that the model cannot take.
    """
    if room is not None and environment not in _WRITTEN and (short := _beginning(task, room * _CHARACTERS)):
        prompt, tokens = await prompt_of(short, environment, policy, limits)
        if tokens > room * _FAR_MORE:  # the last words may be other tokens where a text is cut
            return prompt, tokens
    if environment in _WRITTEN:
        sampling = Sampling(max_tokens=_UNLIMITED)
        samples = await _WRITTEN[environment](task, policy, sampling, **limits)
        most = max(len(sample.token_ids) for sample in samples)
        return samples[0].token_ids[samples[0].loss_mask == 0].tolist(), most
    beginning, policy = opening(task), policy if environment == "python" else policy.for_task(task)
    if isinstance(beginning, str) and environment != "python":
        prompt = await policy.tokenize_whole(beginning)
    else:
        prompt = await policy.tokenize(
            [{"role": "user", "content": beginning}] if isinstance(beginning, str) else beginning
        )
    check_vocabulary(task, prompt, limits["vocabulary"])
    return prompt, len(prompt) + 1


def _beginning(task: Task, characters: int) -> Task | None:
    """Return the task with so many characters, at most, of its prompt or last message; None if that is not
    much longer. Of messages before it a template may leave out a part, as it does with reasoning.
    """
    if len(prompt := str(task.get("prompt", ""))) > 2 * characters:
        return {**task, "prompt": prompt[:characters]}
    *messages, last = task.get("messages") or [{}]
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str) or len(content) <= 2 * characters:
        return None
    return {**task, "messages": [*messages, {**last, "content": content[:characters]}]}
