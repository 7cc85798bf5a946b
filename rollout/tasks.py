"""Tasks: what the model is asked. Read from JSON lines, or built in; which task a slot is; every seed of a
run.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout.counter_rng import random_bits

Task = dict[str, Any]
"""`id` (always there once loaded), `prompt` or `messages`, `answer` (optional), and any other fields."""

Split = Literal["train", "eval"]

EVAL_TASKS = 512
"""Held-out tasks of the built-in arithmetic."""


class TaskError(ValueError):
    """A task file that cannot be used: `FILE:LINE: reason`, or `FILE: reason`."""


@dataclass(frozen=True)
class TaskSet:
    """Tasks in their order, and the sha256 (hex) of their content: the same tasks, the same digest."""

    tasks: tuple[Task, ...]
    digest: str


def load_tasks(spec: str, *, seed: int, split: Split) -> TaskSet:
    """The tasks that `spec` names: the path of a JSON-lines file, or `builtin:arithmetic`.

    `seed` and `split` matter to the built-in tasks only: a file is taken whole. Raises TaskError.
    """
    if not spec.startswith("builtin:"):
        tasks = _read_file(spec)
    elif spec == "builtin:arithmetic":
        tasks = _arithmetic(seed, split)
    else:
        raise TaskError(f"{spec}: no such built-in task set; there is builtin:arithmetic")
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return TaskSet(tuple(tasks), digest.hexdigest())


def task_order(size: int, seed: int, start: int, count: int) -> list[int]:
    """Task indices number start .. start + count of an endless stream: pass after pass over all `size` tasks,
    each pass a permutation of its own. A pure function, so every node and every restart sees the same stream.
    """
    if size < 1 or start < 0 or count < 0:
        raise ValueError(f"task_order: size {size} must be > 0, start {start} and count {count} must be >= 0")
    order: list[int] = []
    while len(order) < count:
        number, offset = divmod(start + len(order), size)
        order += _permutation(size, seed, number)[offset : offset + count - len(order)]
    return order


def group_seed(run_seed: int, kind: Split, iteration: int, slot: int) -> int:
    """The seed of a slot's group, 0 <= seed < 2**62; sample j of the group uses seed + j."""
    return _hash64(f"group/{run_seed}/{kind}/{iteration}/{slot}") >> 2


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _permutation(size: int, seed: int, number: int) -> list[int]:
    # Sorting by hashes instead of numpy's shuffle: its stream may change between numpy versions (NEP 19).
    key = np.array([_hash64(f"order/{seed}/{number}")], dtype=np.uint64)
    return np.argsort(random_bits(key, np.arange(size, dtype=np.uint64)), kind="stable").tolist()


def _arithmetic(seed: int, split: Split) -> list[Task]:
    """Two-digit additions; the answer's digits are reversed, so that the carry runs in writing order.

    Evaluation holds out pairs of operands in both orders: 27+58 is no test for who has trained on 58+27.
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


def _read_file(path: str) -> list[Task]:
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file; give a JSON-lines file or builtin:arithmetic") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
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
    return tasks


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
"""For each known field what it must be, or None where the value is fit."""
