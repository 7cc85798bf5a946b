"""Choose the next tasks: uniformly, in fixed shares of classes, or by past success. Pure: all state is handed
in and returned, so a resumed run goes on in the same order.
"""

import hashlib
import heapq
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from rollout.counter_rng import uniforms
from rollout.settings import RolloutSettings
from rollout.tasks.task_set import Task, TaskError, TaskSet, task_order

UNSEEN_SUCCESS = 0.5
"""Assumed success of a task that was never tried: it counts as the most instructive."""
WEIGHT_FLOOR = 0.05
"""The smallest weight in a curriculum (the largest is 1): tasks always or never solved come rarely."""


@dataclass(frozen=True)
class DrawnTasks:
    """The tasks of an iteration."""

    tasks: list[int]
    """Indices into TaskSet.tasks, in the order in which they are begun."""
    state: dict[str, int]
    """How many tasks each stream has given so far: `state` of the next iteration's draw."""
    waiting: list[int]
    """Tasks that were drawn earlier, and for which there is no place yet."""


def draw(
    tasks: TaskSet,
    settings: RolloutSettings,
    count: int,
    *,
    state: Mapping[str, int],
    again: Sequence[int] = (),
    deferred: Sequence[int],
    success: Mapping[int, float],
    iteration: int,
) -> DrawnTasks:
    """Return the next `count` tasks, by `settings.task_sampling`.

    `state` is what the previous draw returned; it keeps the places of the streams of other settings too.
    `again` are tasks to begin again: they come first. `deferred` are tasks that were drawn but not begun:
    they come next, except in a curriculum, which chooses anew and forgets them. `success` maps each task that
    was tried to its mean success, 0 to 1; only the curriculum uses it. Raises TaskError as `check_sampling`
    does.
    """
    if settings.task_sampling == "curriculum":
        first = list(again[:count])
        chosen = _curriculum(len(tasks.tasks), settings.seed, iteration, count - len(first), success)
        return DrawnTasks(first + chosen, dict(state), [])
    waiting = [*again, *deferred]
    if settings.task_sampling == "ratio":
        return _ratio(tasks, settings, count, state, waiting)
    begin, new = state.get("", 0), max(0, count - len(waiting))
    order = task_order(len(tasks.tasks), settings.seed, begin, new)
    return DrawnTasks(waiting[:count] + order, {**state, "": begin + new}, waiting[count:])


def check_sampling(tasks: TaskSet, settings: RolloutSettings) -> None:
    """Raise TaskError, one line, if `tasks` cannot be drawn by `settings`: a task lacks the class's field, a
    class has no share, a share has no tasks, or no share is above 0.
    """
    if settings.task_sampling == "ratio":
        _classes(tasks, settings)


# ---- ratio


def _ratio(
    tasks: TaskSet, settings: RolloutSettings, count: int, state: Mapping[str, int], waiting: Sequence[int]
) -> DrawnTasks:
    """Draw each class from an endless stream of its own. A stream belongs to the whole ratio, so that another
    ratio starts anew, and does not make up for what the old one did not draw. What waits and is of a class
    without a share is forgotten.
    """
    classes = _classes(tasks, settings)
    shares = {name: Fraction(str(settings.ratio[name])) for name in classes}
    ratio = ",".join(f"{name}:{settings.ratio[name]}" for name in classes)
    keys = {name: f"{name} of {ratio}" for name in classes}
    drawn = {name: state.get(keys[name], 0) for name in classes}
    waiting = [at for at in waiting if _class_of(tasks.tasks[at], settings.ratio_field) in classes]
    sequence = _interleave(shares, drawn, max(0, count - len(waiting)))
    new = {name: sequence.count(name) for name in classes}
    streams = {
        name: iter(task_order(len(indices), settings.seed, drawn[name], new[name], stream=name))
        for name, indices in classes.items()
    }
    order = [classes[name][next(streams[name])] for name in sequence]
    reached = {**state, **{keys[name]: drawn[name] + new[name] for name in classes}}
    return DrawnTasks(waiting[:count] + order, reached, waiting[count:])


def _interleave(shares: Mapping[str, Fraction], drawn: Mapping[str, int], count: int) -> list[str]:
    """Return the classes of the next `count` draws. After N draws in all, a class with the share s has been
    drawn s N times, with an error below 1.

    Draw number j of a class may come at floor(j / s) and must come before ceil((j + 1) / s). The earliest
    deadline goes first, which keeps all deadlines (Baruah, Cohen, Plaxton, Varvel 1996, for one processor).
    """
    total = sum(shares.values(), Fraction(0))
    share = {name: value / total for name, value in shares.items()}
    ready: list[tuple[int, str, int]] = []  # deadline, class, number
    coming = [(int(drawn[name] // share[name]), name, drawn[name]) for name in share]  # from when on, ...
    heapq.heapify(coming)
    sequence: list[str] = []
    now = sum(drawn.values())
    for at in range(now, now + count):
        while coming and coming[0][0] <= at:
            _, name, number = heapq.heappop(coming)
            heapq.heappush(ready, (-int(-(number + 1) // share[name]), name, number))
        _, name, number = heapq.heappop(ready)
        sequence.append(name)
        heapq.heappush(coming, (int((number + 1) // share[name]), name, number + 1))
    return sequence


def _classes(tasks: TaskSet, settings: RolloutSettings) -> dict[str, Sequence[int]]:
    """Return the task indices of each class whose share is above 0, by name."""
    field = settings.ratio_field
    if field not in tasks.classes:  # all tasks are read once, not in each iteration
        found_now: dict[str, Any] = {}
        for index, task in enumerate(tasks.tasks):
            found_now.setdefault(_class_of(task, field), array("Q")).append(index)
        tasks.classes[field] = found_now
    classes = tasks.classes[field]
    sizes = ", ".join(f"{name} ({len(indices)} tasks)" for name, indices in sorted(classes.items()))
    counts = f"by {settings.ratio_field!r} (rollout.ratio_field) there are: {sizes}"
    if not any(settings.ratio.values()):
        raise TaskError(
            f"rollout.task_sampling=ratio needs shares above 0, e.g. rollout.ratio.{min(classes)}=1; {counts}"
        )
    for name in settings.ratio:
        if name not in classes:
            raise TaskError(f"rollout.ratio.{name}={settings.ratio[name]:g}: no such class; {counts}")
    for name in classes:
        if name not in settings.ratio:
            raise TaskError(
                f"rollout.ratio has no share for the class {name!r}; give rollout.ratio.{name}=0 to leave it "
                f"out; {counts}"
            )
    return {name: indices for name, indices in sorted(classes.items()) if settings.ratio[name] > 0}


def _class_of(task: Task, field: str) -> str:
    value = task.get(field)
    if isinstance(value, (str, int, float)):
        return str(value)
    problem = f"its field {field!r} is {value!r}" if field in task else f"it has no field {field!r}"
    raise TaskError(
        f"rollout.task_sampling=ratio: task {task['id']!r} has no class: {problem}; give every task a string "
        "or a number there, or set rollout.ratio_field"
    )


# ---- curriculum


def _curriculum(size: int, seed: int, iteration: int, count: int, success: Mapping[int, float]) -> list[int]:
    """Prefer tasks whose success p varies most from sample to sample: weight 4 p (1 - p), the variance of a
    success ("learnability", Foster et al. 2025, arXiv 2502.12272).

    Draws without replacement until every task has come once: it takes the `count` smallest -ln(u) / weight,
    where u is uniform (Efraimidis and Spirakis 2006), hashed from seed, iteration, pass and task.
    """
    p = np.full(size, UNSEEN_SUCCESS)
    p[np.fromiter(success.keys(), np.intp, len(success))] = np.fromiter(success.values(), float, len(success))
    p = p.clip(0.0, 1.0)
    weight = np.maximum(4.0 * p * (1.0 - p), WEIGHT_FLOOR)
    chosen: list[int] = []
    while len(chosen) < count:
        text = f"curriculum/{seed}/{iteration}/{len(chosen) // size}"
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u8")
        u = 1.0 - uniforms(key, np.arange(size, dtype=np.uint64))  # in (0, 1]
        order = np.argsort(-np.log(u) / weight, kind="stable")
        chosen += order[: count - len(chosen)].tolist()
    return chosen
