"""Look at the tokens that tasks become, before the start: what is too long, what hardly anybody means."""

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import RunTasks
from coordinator.start.refusals_of_models import room_at_teacher
from coordinator.start.refusals_of_tasks import PlayedTasks, has_own_teacher, played_tasks
from rollout.engines.answers import EngineError
from rollout.engines.embedded.local_tokenizer import LocalTokenizer, NoTokenizer, close_tokenizer
from rollout.engines.kinds.choice import any_kind
from rollout.engines.kinds.kind import EngineKind
from rollout.environments.environment import BUILT_IN
from rollout.environments.prompts import rendered_prompt
from rollout.environments.self_teacher import SelfTeacher
from rollout.environments.try_tasks import longer_prompts, try_tasks, why_no_tools
from rollout.origin import Sampling
from rollout.settings import WRITTEN
from rollout.tasks.sampling import check_sampling
from rollout.tasks.task_set import TaskError, TaskSet
from rollout.tasks.verifiers import SOURCE as VERIFIERS

log = logging.getLogger(__name__)

SHOWN = 1000
"""Characters of the first prompt that are shown."""

_USES_TOOLS = re.compile(r"""\b(with|bind)_tools\b|\btools\s*=|["']tools["']""")
"""What code has that gives a model tools, by a policy or a client of the OpenAI API."""


def _sampling(settings: RunSettings) -> Sampling:
    """Return the Sampling that decides which tokens a task becomes."""
    rollout = settings.rollout
    return Sampling(
        chat_template=rollout.chat_template, tool_parser=rollout.tool_parser, stop=tuple(rollout.stop)
    )


def without_longer(settings: RunSettings, model_dir: Path, tasks: RunTasks) -> RunTasks:
    """Return all tasks without those whose prompts are longer than `rollout.max_prompt_tokens`, and say so.
    SettingsError if none of a set is left.
    """
    rollout = settings.rollout
    if rollout.max_prompt_tokens is None:
        return tasks
    training, evaluation, sets = tasks
    trained = PlayedTasks(training, rollout.environment, rollout.scoring)
    evaluated = [each for each in played_tasks(settings, tasks) if each.tasks is not training]
    try:
        shorter = {
            id(played.tasks): _without_longer(settings, model_dir, played, rollout.max_prompt_tokens)
            for played in (trained, *evaluated)
        }
    except EngineError as error:
        raise SettingsError(f"--model {settings.model}: {error}") from None
    except TaskError as error:
        raise SettingsError(str(error)) from None
    finally:
        close_tokenizer()
    check_sampling(shorter[id(training)], rollout)
    sets = {name: replace(each, tasks=shorter.get(id(each.tasks), each.tasks)) for name, each in sets.items()}
    return RunTasks(shorter[id(training)], evaluation and shorter.get(id(evaluation), evaluation), sets)


def _without_longer(settings: RunSettings, model_dir: Path, played: PlayedTasks, longest: int) -> TaskSet:
    tasks, sampling = played.tasks, _sampling(settings)
    tokenizer = LocalTokenizer(model_dir)
    lengths = longer_prompts(tasks, played.environment, model_dir, sampling, tokenizer, longest)
    if not lengths:
        return tasks
    if len(lengths) == len(tasks.tasks):
        if not played.columns_section and settings.rollout_split == "eval-only":
            return tasks  # nothing is made of them
        option = f"{played.section}.tasks=" if played.section else "--tasks "
        option = "--eval-tasks " if played.columns_section == "eval" else option
        raise SettingsError(
            f"rollout.max_prompt_tokens={longest}: all {len(lengths)} prompts of {option}{tasks.source} "
            f"are longer, the shortest has {min(lengths.values())} tokens or more; raise it"
        )
    first, count = next(iter(lengths.items()))
    log.warning(
        "rollout.max_prompt_tokens=%d: %d of %d tasks have longer prompts and are left out, e.g. %s "
        "(%d tokens or more)",
        *(longest, len(lengths), len(tasks.tasks), tasks.place(first), count),
    )
    return tasks.without(lengths)


def first_prompt(settings: RunSettings, model_dir: Path, tasks: RunTasks) -> list[str]:
    """Return a line that shows the first training prompt as the model gets it; none where an environment of
    the user's says what that is, or another template than the model's own makes it.
    """
    environment = settings.rollout.environment
    if environment not in BUILT_IN or any_kind(settings.engine).has_other_template:
        return []
    tokenizer = LocalTokenizer(model_dir)
    try:
        tokens, text = rendered_prompt(tasks.training, environment, model_dir, _sampling(settings), tokenizer)
    finally:
        close_tokenizer()
    shown = f"{text:.{SHOWN}}" + (" ..." if len(text) > SHOWN else "")
    return [f"first prompt, {tokens} tokens: {shown!r}"]


def look_at_text(
    settings: RunSettings,
    model_dir: Path,
    tasks: RunTasks,
    engine: EngineKind,
    code: Iterable[str] = (),
) -> None:
    """Warn of tasks whose tokens hardly anybody means, and of tools that an environment seems to give to a
    model that cannot have them. SettingsError for a task that the model cannot take, and for a model without
    a tokenizer. `code`: texts of the user's modules.
    """
    has_other_template = any_kind(settings.engine).has_other_template
    sampling = _sampling(settings)
    teacher, self_teacher = room_at_teacher(settings, model_dir), SelfTeacher.from_settings(settings.rollout)
    context = any_kind(settings.engine).context(model_dir)
    try:
        for played in played_tasks(settings, tasks):
            is_written = played.environment in WRITTEN
            longest = dict(teacher) if played.tasks is tasks.training else {}
            if context is not None and not is_written:
                longest[f"--model {settings.model}"] = context
            if is_written or (played.environment in BUILT_IN and not has_other_template):
                tokenizer = LocalTokenizer(model_dir)
                if played.environment == "python" and (reason := why_no_tools(sampling, tokenizer)):
                    raise SettingsError(f"{played.option('environment')} python: {reason}")
                for text in try_tasks(
                    played.tasks, played.environment, model_dir, sampling, tokenizer, longest
                ):
                    log.warning("%s", text)
                if self_teacher is not None and played.tasks is tasks.training and context is not None:
                    room = {f"rollout.teacher={settings.rollout.teacher} (with the hint)": context}
                    hinted = self_teacher.hinted_set(_without_own_teacher(settings, tasks.training))
                    try_tasks(hinted, played.environment, model_dir, sampling, tokenizer, room)
            elif not has_other_template and (
                played.environment.startswith(VERIFIERS) or any(map(_USES_TOOLS.search, code))
            ):
                reason = why_no_tools(sampling, LocalTokenizer(model_dir))
                name = f"{played.option('environment')} {played.environment}"
                if reason:
                    log.warning("%s: a group with tools will be given up: %s", name, reason)
    except TaskError as error:
        raise SettingsError(str(error)) from None
    except NoTokenizer as error:
        if settings.rollout.environment in WRITTEN or engine.uses_transformers:
            raise SettingsError(
                f"--model {settings.model}: transformers cannot load its tokenizer ({error}); give it a "
                "tokenizer.json (its save_pretrained writes one, where it can be loaded)"
            ) from None
    except EngineError as error:
        if settings.rollout.environment in WRITTEN:
            raise SettingsError(f"--model {settings.model}: {error}") from None
    finally:
        if settings.rollout.environment not in WRITTEN:
            close_tokenizer()


def _without_own_teacher(settings: RunSettings, tasks: TaskSet) -> TaskSet:
    if not settings.rollout.teachers:
        return tasks
    return tasks.without([n for n, task in enumerate(tasks.tasks) if has_own_teacher(settings, task)])
