"""Refuse before the start tasks that certainly cannot work: each in one line, with what to do.

What may work passes: an environment of the user's may score and render by itself, a server may know more.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import SECTION, RunTasks, with_columns_of
from rollout.engines.embedded.try_pictures import why_no_pictures
from rollout.engines.kinds.choice import any_kind
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.kind import EngineKind
from rollout.engines.model_facts import has_processor, may_have_chat_template, takes_pictures
from rollout.environments.environment import BUILT_IN, check_played
from rollout.environments.self_teacher import FEEDBACK, SelfTeacher
from rollout.pictures import pictures_in
from rollout.rewards.parts import rewards_of_sources
from rollout.rewards.resolve import check_task
from rollout.settings import WRITTEN
from rollout.tasks.task_set import SHAPES, Task, TaskError, TaskSet

log = logging.getLogger(__name__)

_MOST_SHOWN = 10


def evaluates(settings: RunSettings) -> bool:
    """Return whether the run evaluates, if it has tasks for that."""
    if settings.rl_phase == "update" or settings.rollout_split == "train-only":
        return False
    return settings.rollout_split == "eval-only" or settings.eval.interval > 0


class PlayedTasks(NamedTuple):
    """Tasks of which the run makes samples."""

    tasks: TaskSet
    environment: str
    reward: str
    section: str = ""
    """Where the settings are, if they are not those of `rollout`."""
    columns_section: str = ""
    """Where the columns of its data are named, if not at the top."""

    def option(self, name: str) -> str:
        """Return the option that names the reward, or the environment."""
        return f"{self.section}.{name}" if self.section else f"--{name}"


def played_tasks(settings: RunSettings, tasks: RunTasks) -> list[PlayedTasks]:
    """Return the task sets of which the run makes samples."""
    played: list[PlayedTasks] = []
    environment, reward = settings.rollout.environment, settings.rollout.scoring
    if settings.rl_phase != "update" and settings.rollout_split != "eval-only":
        played.append(PlayedTasks(tasks.training, environment, reward))
    if evaluates(settings) and tasks.evaluation is not None:
        answered = "single_turn" if environment in WRITTEN else environment
        played.append(PlayedTasks(tasks.evaluation, answered, reward, columns_section="eval"))
    if evaluates(settings):
        for name, eval_set in settings.eval_sets.items():
            section, those = f"{SECTION}{name}", tasks.sets[name].tasks
            functions = str(eval_set.environment), str(eval_set.reward)
            played.append(PlayedTasks(those, *functions, section, section))
    return played


def refuse_unscored(settings: RunSettings, tasks: RunTasks) -> None:
    """Raise SettingsError for the first task that the built-in reward cannot score."""
    for played in played_tasks(settings, tasks):
        if played.environment in WRITTEN or played.environment not in BUILT_IN:
            continue  # it gives the rewards itself, or may do so
        for index, task in enumerate(played.tasks.tasks):
            try:
                check_task(played.reward, task)
            except ValueError as error:
                option, rewards = played.option("reward"), rewards_of_sources(played.reward)
                reward = rewards.of_task(task)
                if (source := str(task.get(rewards.field))) in rewards.by_source:
                    option = f"rollout.rewards.{source}"
                raise SettingsError(
                    f"{played.tasks.place(index)}: {option} {reward} cannot score this task: "
                    f"{with_columns_of(played.columns_section, error)}; repair it, or give another {option}"
                ) from None


def refuse_unhinted(settings: RunSettings, tasks: TaskSet) -> None:
    """Raise SettingsError for the first training task without a hint for rollout.teacher=self:FIELD,
    unless its environment may give one.
    """
    teacher, environment = SelfTeacher.from_settings(settings.rollout), settings.rollout.environment
    played = settings.rl_phase != "update" and settings.rollout_split != "eval-only"
    if teacher is None or not played or (teacher.field == FEEDBACK and environment not in BUILT_IN):
        return
    for index, task in enumerate(tasks.tasks):
        if has_own_teacher(settings, task):
            continue
        try:
            teacher.hinted(task)
        except TaskError as error:
            raise SettingsError(f"{tasks.place(index)}: {error}; add it, or name another field") from None


def has_own_teacher(settings: RunSettings, task: Task) -> bool:
    """Return whether a task is of a source that rollout.teachers names."""
    return str(task.get(settings.rollout.ratio_field)) in settings.rollout.teachers


def refuse_unknown_sources(settings: RunSettings, tasks: TaskSet) -> None:
    """Raise SettingsError for a source of trainer.sources, rollout.teachers or rollout.rewards that no task
    is of.
    """
    names = {name: f"rollout.teachers.{name}" for name in settings.rollout.teachers}
    names |= {name: f"rollout.rewards.{name}" for name in settings.rollout.rewards}
    names |= {name: f"trainer.sources.{name}" for name in settings.trainer.sources}
    if not names:
        return
    field = settings.rollout.ratio_field
    counts = Counter(str(task.get(field)) for task in tasks.tasks)
    for name, setting in names.items():
        if name not in counts:
            sizes = ", ".join(
                f"{source} ({count} tasks)" for source, count in sorted(counts.items())[:_MOST_SHOWN]
            )
            raise SettingsError(
                f"{setting}: no task of --tasks {settings.tasks} has that {field!r} "
                f"(rollout.ratio_field); there are: {sizes}"
            )


def refuse_unplayed(settings: RunSettings, tasks: RunTasks) -> None:
    """Raise SettingsError for the first task that an environment from elsewhere says is not its own."""
    for played in played_tasks(settings, tasks):
        for index, task in enumerate(played.tasks.tasks):
            try:
                check_played(played.environment, task)
            except ValueError as error:
                raise SettingsError(
                    f"{played.tasks.place(index)}: {played.option('environment')} {played.environment} "
                    f"cannot play this task: {error}"
                ) from None


def refuse_unrendered(settings: RunSettings, model_dir: Path, tasks: RunTasks) -> None:
    """Raise SettingsError for a task with messages if the model certainly has no chat template."""
    if any_kind(settings.engine).has_other_template or may_have_chat_template(model_dir):
        return
    for played in played_tasks(settings, tasks):
        those = played.tasks
        index = next((n for n, task in enumerate(those.tasks) if "messages" in task), None)
        if played.environment in BUILT_IN and index is not None:
            raise SettingsError(
                f"{those.place(index)}: this task has `messages`, but --model {settings.model} has no chat "
                f"template to write them with; add {model_dir / 'chat_template.jinja'}, take a model that "
                "has one, or give each task a `prompt`"
            )


def refuse_pictures(
    settings: RunSettings, engine: EngineKind, model_dir: Path | None, tasks: RunTasks
) -> None:
    """Raise SettingsError if a task shows a picture and something that it would meet does not know pictures.
    `model_dir`: None for builtin:tiny.
    """
    shown = [each for each in played_tasks(settings, tasks) if each.tasks.pictures]
    if not shown:
        return
    takes = settings.tasks == SHAPES if model_dir is None else takes_pictures(model_dir)
    rollout, trainer, model = settings.rollout, settings.trainer, f"--model {settings.model}"
    answered = [task for played in shown if played.environment not in WRITTEN for task in played.tasks.tasks]
    lora, size, ranks = trainer.lora.rank, trainer.tensor_parallel_size, trainer.context_parallel
    reasons = [
        (not takes, f"{model}, which has no part for pictures,", "give a model with a vision_config"),
        (
            model_dir is not None and not has_processor(model_dir),
            f"{model} without a preprocessor_config.json",
            "put the files of its processor beside its weights",
        ),
        (
            lora and not trainer.freeze_vision and answered and not isinstance(engine, Embedded),
            f"trainer.lora.rank={lora} with trainer.freeze_vision=false and {engine.name}",
            "leave out one of them, or give --engine torch",
        ),
        (size > 1, f"trainer.tensor_parallel_size={size}", "give 1"),
        (ranks > 1, f"trainer.context_parallel={ranks}", "give 1"),
        *((value, f"rollout.{name}={value}", "leave it out")
          for name in ("segment_tokens", "teacher")
          for value in [getattr(rollout, name)]),
    ]  # fmt: skip
    subject = f"{_first_with_picture(shown[0].tasks)}: this task shows a picture"
    for is_wrong, what_fails, advice in reasons:
        if is_wrong:
            raise SettingsError(f"{subject}, and {what_fails} does not go with it yet; {advice}")
    if model_dir is not None and (reason := why_no_pictures(model_dir)):
        raise SettingsError(f"{subject}, and {model} cannot be shown any: {reason}")
    if most := max((len(pictures_in(task.get("messages"))) for task in answered), default=0):
        engine.check_pictures(most)


def _first_with_picture(tasks: TaskSet) -> str:
    index = next(n for n, task in enumerate(tasks.tasks) if pictures_in(task.get("messages")))
    return tasks.place(index)


def refuse_no_evaluation(settings: RunSettings, overrides: Mapping[str, Any], has_tasks: bool) -> None:
    """Raise SettingsError if evaluation is asked for in `overrides`, what was typed, without tasks for it."""
    if has_tasks:
        return
    option = f"--eval-interval {settings.eval.interval}" if overrides.get("eval.interval") else ""
    option = "--rollout-split eval-only" if settings.rollout_split == "eval-only" else option
    if option and evaluates(settings):
        raise SettingsError(
            f"{option} needs tasks to evaluate on, and --tasks {settings.tasks} has none for it; add "
            f"--eval-tasks FILE, or leave {option.split()[0]} out"
        )
