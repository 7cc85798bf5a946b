"""The environment `preference`: its group has two samples, the task's better and its worse answer.

As in `demonstration`, nothing is generated. It needs a tokenizer, and no engine.
"""

import logging
from collections.abc import Sequence

from rollout.environments.demonstration import SAID, check_each, messages_before, written
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.tasks.fields import name_of_answer
from rollout.tasks.messages import Message
from rollout.tasks.task_set import Task, TaskError, TaskSet
from rollout.trajectory import Sample

log = logging.getLogger(__name__)

REWARDS = {"chosen": 1.0, "rejected": 0.0}
"""The reward of the answer in each of these fields of a task."""


async def preference(
    task: Task,
    policy: Policy,
    sampling: Sampling,
    end_ids: Sequence[int] = (),
    context: int | None = None,
    vocabulary: int | None = None,
) -> list[Sample]:
    """Make two samples (`sampling.n` is ignored), with the rewards 1 and 0. Each is made as `demonstration`
    makes one.

    The answers are the fields `chosen` and `rejected`: texts, or lists of messages, which may begin with the
    task's own. Raises TaskError, which names the task, if one is missing, has more than one message, or is
    too long, as there.
    """
    samples: list[Sample] = []
    for name, reward in REWARDS.items():
        answer, limits = _answer(task, name), (end_ids, context, vocabulary)
        sample = await written(task, answer, policy, sampling.max_tokens, *limits)
        sample.reward = reward
        samples.append(sample)
    return samples


preference.demonstrates = True  # pyright: ignore[reportFunctionMemberAccess]  (see Environment)


def check_preferences(tasks: TaskSet) -> None:
    """Raise TaskError, which names the task and its place, if a task has no pair of answers. Warn of pairs of
    one answer, which data sets of ratings have where two are rated alike.
    """

    def is_equal(task: Task) -> bool:
        chosen, rejected = (_answer(task, name) for name in REWARDS)
        return chosen == rejected

    if equal := sum(check_each(tasks, is_equal)):
        log.warning("%d of %d pairs have the same answer twice, and teach nothing", equal, len(tasks.tasks))


def _answer(task: Task, name: str) -> Message:
    """Return the answer in a field of the task."""
    answer = task.get(name)
    if isinstance(answer, list):
        prompt = messages_before(task) if "messages" in task else []
        turns = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
        if len(turns) != 1 or not isinstance(turns[0], dict) or turns[0].get("role") != "assistant":
            raise TaskError(
                f"task {task['id']!r}: `{name}` must be one message of the assistant, or the task's messages "
                f"with that behind them; it has {len(turns)} messages of its own"
            )
        message: Message = turns[0]
    else:
        message = {"role": "assistant", "content": answer if isinstance(answer, str) else ""}
    if not any(message.get(name) for name in SAID):
        advice = "" if name in task else f"; {name_of_answer(task, name)}"
        raise TaskError(
            f"task {task['id']!r} has no answer in `{name}`; a preference has two, `chosen` and `rejected`"
            f"{advice}"
        )
    return message
