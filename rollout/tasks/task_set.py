"""Load tasks from files, the built-in set or libraries; order them; derive every seed of a run."""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout.counter_rng import random_bits
from rollout.settings import GENERATED
from rollout.tasks import reasoning_gym
from rollout.tasks.fields import task_of
from rollout.tasks.file_kinds import HUB, RowError, place
from rollout.tasks.messages import with_digests, with_system_prompt
from rollout.tasks.openenv import openenv_tasks
from rollout.tasks.pictures import TaskPictures
from rollout.tasks.read_rows import rows
from rollout.tasks.shape_pictures import shape_tasks
from rollout.tasks.stored import SomeTasks, StoredTasks
from rollout.tasks.text_gym import text_gym_tasks
from rollout.tasks.verifiers import verifiers_tasks

Task = dict[str, Any]
"""`id` (always there once loaded), `prompt` or `messages`, `answer` (optional), and any other fields."""

Split = Literal["train", "eval"]

EVAL_TASKS = 512
"""How many tasks each built-in set holds out."""


class TaskError(ValueError):
    """Tasks cannot be used; the message is `FILE:LINE: reason`, `FILE, row N: reason`, or `FILE: reason`."""


@dataclass
class Places:
    """The file and the line, or row, of each task."""

    files: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    """The index of the first task of each file."""
    numbers: MutableSequence[int] = field(default_factory=lambda: array("Q"))

    def add(self, file: str, number: int) -> None:
        """Take in the next task."""
        if not self.files or self.files[-1] != file:
            self.files.append(file)
            self.first.append(len(self.numbers))
        self.numbers.append(number)

    def file(self, index: int) -> str:
        """Return the file of a task."""
        return self.files[bisect_right(self.first, index) - 1]

    def place(self, index: int) -> str:
        """Return where a task is: `FILE:LINE`, or `FILE, row N`."""
        return place(self.file(index), self.numbers[index])


@dataclass(frozen=True)
class TaskSet:
    """Tasks in their order, and the sha256 (hex) of their content."""

    tasks: Sequence[Task]
    digest: str
    source: str = ""
    places: Places | None = None
    """Where each task is; None if they were generated."""
    classes: dict[str, dict[str, Sequence[int]]] = field(default_factory=dict, compare=False, repr=False)
    """By field, for sampling: the indices of the tasks that have a value there."""
    pictures: TaskPictures | None = field(default=None, compare=False, repr=False)
    """The pictures that the tasks show, by the digests in their messages; None: they show none."""

    def place(self, index: int) -> str:
        """Return where a task is from: `FILE:LINE`, `FILE, row N`, or the source and the task's id."""
        if self.places is not None:
            return self.places.place(index)
        return f"{self.source}, task {self.tasks[index]['id']!r}"

    def without(self, dropped: Collection[int]) -> "TaskSet":
        """Return the set without the tasks of these indices."""
        indices = [index for index in range(len(self.tasks)) if index not in dropped]
        tasks, digest = SomeTasks(self.tasks, indices), hashlib.sha256()
        for task in tasks:
            digest.update(_canonical(task))
        places = None if self.places is None else Places()
        if self.places is not None and places is not None:
            for index in indices:
                places.add(self.places.file(index), self.places.numbers[index])
        return TaskSet(tasks, digest.hexdigest(), self.source, places, pictures=self.pictures)


def is_file(source: str) -> bool:
    """Return whether `source` names files. Other sources generate the tasks of both splits, or fetch them."""
    return not source.startswith((*GENERATED, HUB))


def load_tasks(
    source: str,
    *,
    seed: int,
    split: Split,
    columns: Mapping[str, str] | None = None,
    directory: str | None = None,
    system_prompt: str | None = None,
) -> TaskSet:
    """Return the tasks that `source` names: the path of a file (see `rows`), of a directory, or a pattern of
    files, hf:NAME:CONFIG:SPLIT, one of BUILT_IN, or KIND:NAME,PARAMETER=VALUE,... with a KIND of
    FROM_LIBRARIES.

    `seed` applies to generated tasks only. So does `split`, and to a data set without a split: then it is
    `train` or `test`. `columns` names the column of a field. `system_prompt` begins each conversation that
    has none. A large set is copied to a temporary file in `directory`. The digest is of the tasks, whatever
    the format of their files is. Raises TaskError.
    """
    if not source.startswith(GENERATED):
        return _load(source, "train" if split == "train" else "test", columns or {}, directory, system_prompt)
    kind, _, parameters = source.partition(":")
    if source not in BUILT_IN and kind not in FROM_LIBRARIES:
        raise TaskError(f"{source}: no such built-in task set; there is {' and '.join(BUILT_IN)}")
    pictures = TaskPictures(directory)
    try:
        if source in BUILT_IN:
            tasks = BUILT_IN[source](seed, split, pictures)
        else:
            tasks = FROM_LIBRARIES[kind](parameters, seed, split)
            for task in tasks:
                if "messages" in task:
                    task["messages"] = with_digests(task["messages"], partial(pictures.take, folder=None))
        tasks = [with_system_prompt(task, system_prompt) for task in tasks]
    except ValueError as error:
        raise TaskError(f"{source}: {error}") from error
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(_canonical(task))
    return TaskSet(tuple(tasks), digest.hexdigest(), source, pictures=pictures if len(pictures) else None)


def _canonical(task: Task) -> bytes:
    return json.dumps(task, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _load(
    source: str,
    default_split: str,
    columns: Mapping[str, str],
    directory: str | None,
    system_prompt: str | None,
) -> TaskSet:
    """Read all rows once, and keep where the tasks are."""
    tasks, places, digest, ids = StoredTasks(directory), Places(), hashlib.sha256(), array("Q")
    pictures = TaskPictures(directory)
    try:
        for row in rows(source, default_split=default_split, images=columns.get("images", "images")):
            folder = None if row.file.startswith(HUB) else Path(row.file).parent
            take = partial(pictures.take, folder=folder)
            try:
                task = task_of(row, row.number if row.file == source else len(tasks) + 1, columns, take)
                task = with_system_prompt(task, system_prompt)
                tasks.append(task)
            except ValueError as error:
                error_text = str(error).replace(
                    "Out of range float values are", "a number that is not finite is"
                )
                raise TaskError(f"{row.place}: {error_text}") from error
            digest.update(_canonical(task))
            ids.append(_hash64(task["id"]))
            places.add(row.file, row.number)
    except RowError as error:
        raise TaskError(str(error)) from error
    tasks.finish()
    if not len(tasks):
        raise TaskError(f'{source}: holds no task; write one JSON object a line, e.g. {{"prompt": "1+2="}}')
    _refuse_same_ids(tasks, places, np.frombuffer(ids, np.uint64))
    return TaskSet(tasks, digest.hexdigest(), source, places, pictures=pictures if len(pictures) else None)


def _refuse_same_ids(tasks: Sequence[Task], places: Places, ids: np.ndarray) -> None:
    """Raise TaskError for the first task whose id another one has; `ids` (tasks,) are hashes of them."""
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    pairs = sorted((int(order[at + 1]), int(order[at])) for at in same)
    for later, earlier in pairs:
        name = tasks[later]["id"]
        if name == tasks[earlier]["id"]:
            where = places.place(earlier)
            if places.file(earlier) == places.file(later):
                where = where.removeprefix(places.file(later)).lstrip(", ").replace(":", "line ", 1)
            raise TaskError(f"{places.place(later)}: id {name!r} was used in {where} already")


def task_order(size: int, seed: int, start: int, count: int, *, stream: str = "") -> list[int]:
    """Return the task indices from `start` to `start + count` of an endless stream. The stream passes over
    all `size` tasks again and again, each time in another order. It is a pure function, so every node and
    every restart sees the same stream. Each name of a `stream` gives another order.
    """
    if size < 1 or start < 0 or count < 0:
        raise ValueError(f"task_order: size {size} must be > 0, start {start} and count {count} must be >= 0")
    label = f"order/{seed}/{stream}" if stream else f"order/{seed}"
    order: list[int] = []
    while len(order) < count:
        number, offset = divmod(start + len(order), size)
        order += _permutation(size, f"{label}/{number}")[offset : offset + count - len(order)]
    return order


def group_seed(run_seed: int, kind: str, iteration: int, slot: int) -> int:
    """Return the seed of a slot's group, 0 <= seed < 2**62. Sample j of the group uses seed + j."""
    return _hash64(f"group/{run_seed}/{kind}/{iteration}/{slot}") >> 2


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _permutation(size: int, label: str) -> list[int]:
    # Sorts by hashes: the stream of numpy's shuffle may change between numpy versions (NEP 19).
    key = np.array([_hash64(label)], dtype=np.uint64)
    return np.argsort(random_bits(key, np.arange(size, dtype=np.uint64)), kind="stable").tolist()


def _arithmetic(seed: int, split: Split, _pictures: TaskPictures) -> list[Task]:
    """Two-digit additions. The answer's digits are reversed, so that the carry runs in writing order.

    Evaluation holds out pairs of operands in both orders: 58+27 in training would give away 27+58.
    """
    pairs = _pairs(f"arithmetic/{seed}", split)
    return [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in pairs]


def _products(seed: int, split: Split, _pictures: TaskPictures) -> list[Task]:
    """Two-digit multiplications: too hard for a small model without a calculator."""
    pairs = _pairs(f"products/{seed}", split)
    return [{"id": f"{a}*{b}", "prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]


def _pairs(key: str, split: Split) -> list[tuple[int, int]]:
    """Return the pairs of operands of a split; those of evaluation are chosen by `key`."""
    unordered = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    unordered.sort(key=lambda pair: _hash64(f"{key}/{pair[0]}+{pair[1]}"))
    held_out = [ordered for a, b in unordered[: EVAL_TASKS // 2] for ordered in ((a, b), (b, a))]
    if split == "eval":
        return held_out
    excluded = set(held_out)
    return [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in excluded]


def _shapes(seed: int, split: Split, pictures: TaskPictures) -> list[Task]:
    return shape_tasks(seed, split, EVAL_TASKS, pictures.take)


SHAPES = "builtin:shapes"
BUILT_IN: dict[str, Callable[[int, Split, TaskPictures], list[Task]]] = {
    "builtin:arithmetic": _arithmetic,
    "builtin:products": _products,
    SHAPES: _shapes,
}
FROM_LIBRARIES: dict[str, Callable[[str, int, Split], list[Task]]] = {
    "reasoning_gym": lambda parameters, seed, split: reasoning_gym.gym_tasks(
        parameters, seed=seed, split=split
    ),
    "gym": lambda parameters, seed, split: text_gym_tasks(parameters, seed=seed, split=split),
    "openenv": lambda parameters, seed, split: openenv_tasks(parameters, seed=seed, split=split),
    "verifiers": lambda parameters, seed, split: verifiers_tasks(parameters, split=split),
}
"""By the beginning of a source: what makes the tasks of the rest. It raises ValueError."""
