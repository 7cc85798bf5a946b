"""The environment `labelled`: its group has one sample, the task's answer, good or bad as its label says.

As in `demonstration`, nothing is generated. It needs a tokenizer, and no engine.
"""

from collections.abc import Sequence

from rollout.environments.demonstration import check_each, demonstrated, written
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.tasks.fields import completion_of, whole_number
from rollout.tasks.messages import ANSWER, Message
from rollout.tasks.task_set import Task, TaskError, TaskSet
from rollout.trajectory import Sample

_REWARDS = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
"""By what a label is as a text: a table of texts has no others."""


async def labelled(
    task: Task,
    policy: Policy,
    sampling: Sampling,
    end_ids: Sequence[int] = (),
    context: int | None = None,
    vocabulary: int | None = None,
) -> list[Sample]:
    """Make one sample (`sampling.n` is ignored) as `demonstration` does, with reward 1 if the field `label`
    is true, else 0. The answer may be the field `completion` too. Raises TaskError, which names the task, as
    there, and if the label is neither true nor false.
    """
    limits = (end_ids, context, vocabulary)
    sample = await written(task, _answer(task), policy, sampling.max_tokens, *limits)
    sample.reward = _reward(task)
    return [sample]


labelled.demonstrates = True  # pyright: ignore[reportFunctionMemberAccess]  (see Environment)


def check_labels(tasks: TaskSet) -> None:
    """Raise TaskError, which names the task and its place, if a task has no answer or no label."""
    check_each(tasks, lambda task: (_answer(task), _reward(task)))


def _answer(task: Task) -> Message:
    """Return the answer that the label is of."""
    try:
        completion = None if {ANSWER, "answer"} & task.keys() else completion_of(task)
    except ValueError as error:
        raise TaskError(f"task {task['id']!r}: {error}") from None
    unlabelled = {name: value for name, value in task.items() if name != "label"}
    return demonstrated({**unlabelled, ANSWER: completion} if completion else unlabelled)


def _reward(task: Task) -> float:
    """Return the reward that the label is worth."""
    label = whole_number(task.get("label"))
    if (reward := _REWARDS.get(str(label).lower())) is None:
        raise TaskError(
            f"task {task['id']!r}: its `label` is {label!r}, neither true nor false; name the column that "
            "says whether its answer is good, e.g. columns.label=kto_tag"
        )
    return reward
