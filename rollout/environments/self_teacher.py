"""The policy as its own teacher: how likely it finds a sample's tokens behind a prompt that has a hint.

rollout.teacher=self:FIELD
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engines.answers import RequestRefused
from rollout.environments.policy import Policy
from rollout.environments.turns import opening
from rollout.settings import SELF, RolloutSettings
from rollout.tasks.messages import Message, same_beginning
from rollout.tasks.task_set import Task, TaskError, TaskSet
from rollout.trajectory import Sample

FEEDBACK = "feedback"
"""The field that Sample.feedback takes the place of."""


@dataclass(frozen=True)
class SelfTeacher:
    """Asks the engine that has made a sample, after writing a field of the task into the first prompt."""

    field: str
    template: str

    @classmethod
    def from_settings(cls, settings: RolloutSettings) -> "SelfTeacher | None":
        """Return the teacher of rollout.teacher=self:FIELD; None for another one, or none."""
        name = settings.teacher or ""
        return cls(name.removeprefix(SELF), settings.teacher_template) if name.startswith(SELF) else None

    def of_task(self, task: Task, policy: Policy) -> "TaskTeacher":
        """Return the teacher of a task's samples."""
        return TaskTeacher(self, task, policy)

    def hinted(self, task: Task, feedback: str | None = None) -> Task:
        """Return the task with the hint in its prompt, or in its user's last message. Raises TaskError."""
        hint = task.get(self.field)
        if self.field == FEEDBACK and feedback is not None:
            hint = feedback
        if hint in (None, "", []):
            raise TaskError(
                f"task {task['id']!r}: has no `{self.field}` for rollout.teacher={SELF}{self.field}"
            )
        hint = hint if isinstance(hint, str) else json.dumps(hint, ensure_ascii=False)
        beginning = opening(task)
        if isinstance(beginning, str):
            return {**task, "prompt": self._filled(beginning, hint)}
        places = [at for at, message in enumerate(beginning) if message["role"] == "user"]
        if not places:
            raise TaskError(f"task {task['id']!r}: has no message of the user for the hint of its teacher")
        messages, at = list(beginning), places[-1]
        messages[at] = {**messages[at], "content": self._filled(messages[at]["content"], hint)}
        return {**task, "messages": messages}

    def hinted_set(self, tasks: TaskSet) -> TaskSet:
        """Return the tasks with the hints in their prompts, each made when it is asked for."""
        return replace(tasks, tasks=_HintedTasks(self, tasks.tasks), classes={})

    def _filled(self, prompt: str, hint: str) -> str:
        words = {"prompt": prompt, "hint": hint}
        return re.sub(r"\{(prompt|hint)\}", lambda place: words[place[1]], self.template)


class _HintedTasks(Sequence[Task]):
    def __init__(self, teacher: SelfTeacher, tasks: Sequence[Task]) -> None:
        self._teacher = teacher
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._teacher.hinted(self._tasks[index])


class TaskTeacher:
    """Asks about the samples of one task, whose prompts it reads once."""

    def __init__(self, teacher: SelfTeacher, task: Task, policy: Policy) -> None:
        self._teacher = teacher
        self._task = task
        self._policy = policy
        self._reading = asyncio.Lock()
        self._read: dict[str | None, list[tuple[list[int], list[int]]]] = {}
        """By feedback: how the first prompt of a sample may end, and what stands there with the hint."""

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        """(T,) the policy's logprob of each trained token of a sample behind the prompt with the hint,
        natural log, at temperature 1; 0 where a token is not trained. What an environment has put before the
        task's words stays. Raises TaskError if there is no such prompt, or EngineError.
        """
        logprobs, trained = np.zeros(len(sample.token_ids), np.float32), np.flatnonzero(sample.loss_mask)
        if not len(trained):
            return logprobs
        async with self._reading:
            if sample.feedback not in self._read:
                self._read[sample.feedback] = await self._endings(sample.feedback)
        first, ids = int(trained[0]), sample.token_ids.tolist()
        endings = self._read[sample.feedback]
        plain, other = next((pair for pair in endings if ids[:first][-len(pair[0]) :] == pair[0]), ([], []))
        if not plain:
            raise TaskError(
                f"task {self._task['id']!r}: its environment begins with another prompt than the task's, so "
                f"rollout.teacher={SELF}{self._teacher.field} has no place for the hint; leave it out"
            )
        ids[first - len(plain) : first] = other
        shift = len(other) - len(plain)
        logprobs[trained] = np.array([0.0, *await self._policy.logprobs(ids)])[trained + shift]
        return logprobs

    async def _endings(self, feedback: str | None) -> list[tuple[list[int], list[int]]]:
        """Return how the prompt of the task ends from where the hint makes a difference, without it and with
        it; that of a text also as a message, which an environment may give to the chat template.
        """
        plain, other = opening(self._task), opening(self._teacher.hinted(self._task, feedback))
        endings = [await self._ending(plain, other)]
        if isinstance(plain, str):
            with contextlib.suppress(RequestRefused):  # a model may have no chat template
                endings.append(await self._ending(*([_of_user(text)] for text in (plain, other))))
        return endings

    async def _ending(self, *prompts: Any) -> tuple[list[int], list[int]]:
        ids, with_hint = await asyncio.gather(*(_token_ids(prompt, self._policy) for prompt in prompts))
        # A text is looked for whole but for its first token, which may differ behind other words.
        same = min(same_beginning(ids, with_hint), 1 if isinstance(prompts[0], str) else len(ids))
        return ids[same:], with_hint[same:]


def _of_user(text: Any) -> Message:
    return {"role": "user", "content": text}


async def _token_ids(prompt: str | list[Message], policy: Policy) -> list[int]:
    return await (policy.tokenize_whole(prompt) if isinstance(prompt, str) else policy.tokenize(prompt))
