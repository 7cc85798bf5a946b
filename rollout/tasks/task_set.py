"""Load tasks from JSON lines, the built-in set or Reasoning Gym; order them; derive every seed of a run."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout.counter_rng import random_bits
from rollout.settings import GENERATED
from rollout.storage import files
from rollout.tasks import reasoning_gym

Task = dict[str, Any]
"""`id` (always there once loaded), `prompt` or `messages`, `answer` (optional), and any other fields."""

Split = Literal["train", "eval"]

EVAL_TASKS = 512
"""How many tasks the built-in arithmetic holds out."""


class TaskError(ValueError):
    """Tasks cannot be used; the message is `FILE:LINE: reason`, or `FILE: reason`."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks in their order, and the sha256 (hex) of their content."""

    tasks: tuple[Task, ...]
    digest: str
    source: str = ""
    lines: tuple[int, ...] = ()
    """The line of each task in the file `source`; none if they were generated."""

    def place(self, index: int) -> str:
        """Return where a task is from: `FILE:LINE`, or the source and the task's id."""
        if self.lines:
            return f"{self.source}:{self.lines[index]}"
        return f"{self.source}, task {self.tasks[index]['id']!r}"


def is_file(source: str) -> bool:
    """Return whether `source` names a file. Other sources generate the tasks of both splits."""
    return not source.startswith(GENERATED)


def load_tasks(source: str, *, seed: int, split: Split) -> TaskSet:
    """Return the tasks that `source` names: the path of a JSON-lines file, `builtin:arithmetic`, or
    `reasoning_gym:NAME,PARAMETER=VALUE,...` (see `reasoning_gym`).

    `seed` and `split` apply to generated tasks only: all tasks of a file are taken. Raises TaskError.
    """
    lines: tuple[int, ...] = ()
    if is_file(source):
        tasks, lines = _read_file(source)
    elif source.startswith(reasoning_gym.SOURCE):
        try:
            tasks = reasoning_gym.gym_tasks(source.removeprefix(reasoning_gym.SOURCE), seed=seed, split=split)
        except ValueError as error:
            raise TaskError(f"{source}: {error}") from error
    elif source == "builtin:arithmetic":
        tasks = _arithmetic(seed, split)
    else:
        raise TaskError(f"{source}: no such built-in task set; there is builtin:arithmetic")
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return TaskSet(tuple(tasks), digest.hexdigest(), source, lines)


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


def group_seed(run_seed: int, kind: Split, iteration: int, slot: int) -> int:
    """Return the seed of a slot's group, 0 <= seed < 2**62. Sample j of the group uses seed + j."""
    return _hash64(f"group/{run_seed}/{kind}/{iteration}/{slot}") >> 2


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _permutation(size: int, label: str) -> list[int]:
    # Sorts by hashes: the stream of numpy's shuffle may change between numpy versions (NEP 19).
    key = np.array([_hash64(label)], dtype=np.uint64)
    return np.argsort(random_bits(key, np.arange(size, dtype=np.uint64)), kind="stable").tolist()


def _arithmetic(seed: int, split: Split) -> list[Task]:
    """Two-digit additions. The answer's digits are reversed, so that the carry runs in writing order.

    Evaluation holds out pairs of operands in both orders: 58+27 in training would give away 27+58.
    """
    unordered = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    unordered.sort(key=lambda pair: _hash64(f"arithmetic/{seed}/{pair[0]}+{pair[1]}"))
    held_out = [ordered for a, b in unordered[: EVAL_TASKS // 2] for ordered in ((a, b), (b, a))]
    if split == "eval":
        pairs = held_out
    else:
        excluded = set(held_out)
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in excluded]
    return [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in pairs]


def _read_file(path: str) -> tuple[list[Task], tuple[int, ...]]:
    """Return the tasks of a file, and the line of each."""
    try:
        lines = files.read(Path(path)).split(b"\n")
    except FileNotFoundError:
        by_name = "" if Path(path).suffix else " (data sets are not fetched by their name)"
        raise TaskError(
            f"{path}: no such file{by_name}; give a JSON-lines file, builtin:arithmetic or reasoning_gym:NAME"
        ) from None
    except OSError as error:
        raise TaskError(f"{path}: {error}") from error
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = _parse_task(line, number)
            if task["id"] in line_of:
                raise ValueError(f"id {task['id']!r} was used in line {line_of[task['id']]} already")
        except ValueError as error:
            raise TaskError(f"{path}:{number}: {error}") from error
        line_of[task["id"]] = number
        tasks.append(task)
    if not tasks:
        raise TaskError(f'{path}: holds no task; write one JSON object a line, e.g. {{"prompt": "1+2="}}')
    return tasks, tuple(line_of.values())


def _parse_task(line: bytes, number: int) -> Task:
    """One line as a task; ValueError with the reason."""
    try:
        task = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable JSON: nested too deeply") from error
    if not isinstance(task, dict):
        raise ValueError(f"expected a JSON object, got {_kind(task)}")
    if ("prompt" in task) == ("messages" in task):
        found = "both are there" if "prompt" in task else "neither is there"
        raise ValueError(f"give either `prompt` or `messages`; {found}")
    task.setdefault("id", number)
    for name, check in _FIELD_CHECKS.items():
        if name in task and (wanted := check(task[name])):
            raise ValueError(f"`{name}` must be {wanted}, got {_kind(task[name])}")
    task["id"] = str(task["id"])
    return task


def _no_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}
    if isinstance(value, (list, str)) and not value:
        return f"an empty {'array' if isinstance(value, list) else 'string'}"
    return names.get(type(value), "a string" if isinstance(value, str) else "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_id(value: object) -> str | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return None if is_integer or (isinstance(value, str) and value) else "a non-empty string or an integer"


def _check_prompt(value: object) -> str | None:
    return None if isinstance(value, str) and value else "a non-empty string"


def _check_messages(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "a non-empty array of messages"
    for message in value:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return "messages that each hold the strings `role` and `content`"
    return None


def _check_answer(value: object) -> str | None:
    return (
        None
        if isinstance(value, str) or _is_number(value)
        else "a string or a number (other data: another field)"
    )


_FIELD_CHECKS: dict[str, Callable[[object], str | None]] = {
    "id": _check_id,
    "prompt": _check_prompt,
    "messages": _check_messages,
    "answer": _check_answer,
}
"""For each known field a check: it returns what the value must be, or None if the value is valid."""
