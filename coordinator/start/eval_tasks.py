"""Load what a policy is evaluated on: the tasks of --eval-tasks, and the named sets of `eval.sets`."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.user_functions import Functions, load_functions
from rollout.origin import Code
from rollout.tasks.read_rows import is_there
from rollout.tasks.task_set import TaskError, TaskSet, is_file, load_tasks

log = logging.getLogger(__name__)

SECTION = "eval.sets."
MOST_COMPARED = 200_000
"""Training tasks, at most, that a start compares with the tasks of the sets, in about two seconds."""


@dataclass(frozen=True)
class EvalSet:
    """A named set, loaded."""

    name: str
    tasks: TaskSet
    functions: Functions

    def codes(self) -> dict[str, Code]:
        """Return the Code behind each name, by setting."""
        section = f"{SECTION}{self.name}"
        return {
            f"{section}.tasks": Code(self.tasks.source, self.tasks.digest),
            **self.functions.codes(section),
        }


EvalSets = Mapping[str, EvalSet]


class RunTasks(NamedTuple):
    """All tasks of a run, loaded."""

    training: TaskSet
    evaluation: TaskSet | None = None
    """The tasks of --eval-tasks."""
    sets: EvalSets = MappingProxyType({})


def load_eval_tasks(settings: RunSettings) -> TaskSet | None:
    """Load the tasks of --eval-tasks, or those that --tasks generates for it, if the run ever evaluates: rows
    may be too few for both. Raises SettingsError.
    """
    source = settings.evaluation_tasks
    never = settings.eval.interval == 0 and settings.rollout_split != "eval-only"
    if settings.eval_tasks is None and never:
        return None
    return None if source is None else _load(source, settings, settings.eval_columns, "--eval-tasks ", "eval")


def load_eval_sets(settings: RunSettings) -> dict[str, EvalSet]:
    """Load the named sets; SettingsError says what is wrong with which."""
    loaded: dict[str, EvalSet] = {}
    for name, eval_set in settings.eval_sets.items():
        section = f"{SECTION}{name}"
        functions = load_functions(str(eval_set.reward), str(eval_set.environment), section)
        tasks = _load(eval_set.tasks, settings, eval_set.columns, f"{section}.tasks=", section)
        loaded[name] = EvalSet(name, tasks, functions)
    return loaded


def warn_of_training_tasks(training: TaskSet, eval_tasks: TaskSet | None, sets: EvalSets) -> None:
    """Warn of tasks to evaluate on that are training tasks too, whatever their ids are. Beside more than
    MOST_COMPARED training tasks nothing is compared.
    """
    compared = {f"{SECTION}{name}": eval_set.tasks for name, eval_set in sets.items()}
    compared |= {"--eval-tasks": eval_tasks} if eval_tasks else {}
    if not compared or len(training.tasks) > MOST_COMPARED:
        return
    contents = {_content(task) for task in training.tasks}
    for name, tasks in compared.items():
        shared = [index for index, task in enumerate(tasks.tasks) if _content(task) in contents]
        if not shared:
            continue
        total, first = len(tasks.tasks), tasks.place(shared[0])
        count, less = (
            (f"{len(shared)} of {total}", "less") if len(shared) < total else (f"all {total}", "nothing")
        )
        log.warning("%s: %s tasks are training tasks too, e.g. %s: its score says %s of new tasks",
                    name, count, first, less)  # fmt: skip


def _content(task: Mapping[str, Any]) -> bytes:
    """Return a digest of a task without its id."""
    fields = {name: value for name, value in task.items() if name != "id"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()[:8]


def _load(
    source: str, settings: RunSettings, columns: Mapping[str, str], option: str, section: str
) -> TaskSet:
    try:
        return load_tasks(
            find_data(source, settings),
            seed=settings.rollout.seed,
            split="eval",
            columns=columns,
            directory=settings.cluster.local_dir,
            system_prompt=settings.rollout.system_prompt,
        )
    except TaskError as error:
        raise SettingsError(f"{option}{with_columns_of(section, error)}") from None


def with_columns_of(section: str, error: Exception) -> str:
    """Return the text of an error about tasks, which names columns of --tasks, with those of a section."""
    return re.sub(r"\bcolumns\.(?=\w+[=)])", f"{section}.columns." if section else "columns.", str(error))


def find_data(source: str, settings: RunSettings) -> str:
    """Return where task files are: as given, else below --data-path."""
    below = str(Path(settings.data_path or "") / source)
    is_elsewhere = settings.data_path and is_file(source) and not is_there(source)
    return below if is_elsewhere and is_there(below) else source


def digest_of(tasks: TaskSet | None, sets: EvalSets) -> str | None:
    """Return a digest (hex) of all tasks that a policy is evaluated on; None if there are none. Without named
    sets it is that of the tasks.
    """
    return joined_digest(tasks, {name: eval_set.tasks.digest for name, eval_set in sets.items()})


def joined_digest(tasks: TaskSet | None, sets: Mapping[str, str]) -> str | None:
    """Return the `digest_of` sets whose tasks have these digests, by name."""
    unnamed = tasks.digest if tasks else None
    if not sets:
        return unnamed
    named = "".join(f"{name} {digest}\n" for name, digest in sets.items())
    return hashlib.sha256(f"{unnamed}\n{named}".encode()).hexdigest()
