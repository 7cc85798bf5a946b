"""`--dry-run`: the settings, and what they name, shown, and looked at as a start would."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal.tracker_feed import check_sinks
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import RunTasks, load_eval_sets, load_eval_tasks, warn_of_training_tasks
from coordinator.start.inputs import (
    TINY_CONTEXT,
    base_model_dir,
    engine_of,
    is_path,
    load_named,
    load_training_tasks,
    refuse_absent_directories,
    refuse_no_name,
)
from coordinator.start.last_settings import changes
from coordinator.start.log_path import check_log_path, check_new_run
from coordinator.start.odd_settings import odd_settings
from coordinator.start.refusals_of_models import (
    fit_max_tokens,
    has_end,
    refuse_quantised,
    refuse_two_precisions,
    refuse_undivided,
    refuse_unrecorded,
    refuse_wrong_teacher,
)
from coordinator.start.refusals_of_tasks import refuse_no_evaluation, refuse_pictures, refuse_unrendered
from coordinator.start.request import StartRequest
from coordinator.start.run_json import (
    fixed_by,
    has_run,
    read_run_json,
    refuse_changes,
    refuse_fewer_iterations,
)
from coordinator.start.start import last_start, resume_given
from coordinator.start.texts_of_tasks import first_prompt, look_at_text, without_longer
from coordinator.start.user_functions import load_functions
from coordinator.start.whole_model import refuse_incomplete
from rollout.engines.kinds.choice import any_kind, engine_kind
from rollout.engines.kinds.kind import EngineKind, ServerSettingError
from rollout.engines.model_dir import WeightsError, model_files, policy_digest
from rollout.engines.model_facts import count_parameters
from rollout.engines.special_tokens import read_special_tokens
from rollout.settings import GENERATED, TINY
from rollout.storage import known_files
from rollout.storage.files import is_directory
from rollout.tasks.file_kinds import HUB, RowError, hub_parts
from rollout.tasks.task_set import TaskError, TaskSet

log = logging.getLogger(__name__)


def show(request: StartRequest, looks: bool) -> int:
    """Print the settings that a start of the master would go by, and on stderr what that changes. With
    `looks`, SettingsError for what they name if a start would refuse it, and no settings are printed.
    """
    overrides = resume_given(request)
    settings = build(overrides)
    for change in changes(last_start(request.root), settings):
        print(change, file=sys.stderr)
    is_master = request.rank == MASTER  # a worker takes its settings from the master
    notes = list[str]()
    if looks and is_master:
        notes = check_named(settings, overrides, request.root)
    print(json.dumps(settings.model_dump(mode="json"), indent=2), flush=True)
    for line in notes:
        print(line, file=sys.stderr)
    return 0


def check_named(settings: RunSettings, overrides: Mapping[str, Any], root: Path | None = None) -> list[str]:
    """Check rewards, environments, tasks and model, whatever engine and GPUs this machine has. SettingsError
    says what is wrong with which, also where the run at `root` was started with others. Return lines for
    people: the first prompt, and what is not looked at, as a start would fetch it first.
    """
    if root is not None:
        check_log_path(root)
    refuse_absent_directories(settings)
    try:
        return _check_inputs(settings, overrides, root)
    except (RowError, TaskError, ServerSettingError) as error:
        raise SettingsError(str(error)) from None
    except WeightsError as error:
        raise SettingsError(f"--model {settings.model}: {error}") from None


def _check_inputs(settings: RunSettings, overrides: Mapping[str, Any], root: Path | None) -> list[str]:
    """As check_named. Raises SettingsError, RowError, TaskError, ServerSettingError or WeightsError."""
    sources = [settings.tasks, settings.eval_tasks, *(each.tasks for each in settings.eval_sets.values())]
    fetched = [source for source in sources if source and source.startswith(HUB)]
    any_kind(settings.engine).check_arguments()
    refuse_wrong_teacher(settings)
    functions, tasks, model = None, None, None
    notes: list[str] = []
    for source in fetched:
        hub_parts(source)
    if fetched:
        _load_local(settings)
    else:
        functions, tasks = load_named(settings, overrides)
    if _is_of_disk(settings.model, settings.data_path):
        model = base_model_dir(settings, RunDir(Path()))
    elif settings.model != TINY:
        refuse_no_name(settings.model)
        fetched.append(settings.model)
    if tasks:
        training, evaluation, sets = tasks
        refuse_no_evaluation(settings, overrides, bool(evaluation or sets))
        warn_of_training_tasks(training, evaluation if settings.eval_tasks else None, sets)
        for text in odd_settings(settings, overrides):
            log.warning("%s", text)
    if model is not None:
        refuse_quantised(settings, model)
        refuse_undivided(settings, model)
        has_end(settings, read_special_tokens(model))
        refuse_incomplete(settings, model)
        tasks = tasks and without_longer(settings, model, tasks)
    if model is not None and tasks and functions:
        refuse_unrendered(settings, model, tasks)
        if settings.rl_phase != "update":
            code = [text for _file, text in functions.sources.values()]
            look_at_text(settings, model, tasks, engine_of(settings, MASTER), code)
            notes += first_prompt(settings, model, tasks)
    if root is not None and not has_run(root):
        check_new_run(root, settings)
    if root is not None and has_run(root):
        refuse_fewer_iterations(root, settings)
        are_shorter = model is None and settings.rollout.max_prompt_tokens is not None  # not yet
        _refuse_changes(root, settings, model, None if are_shorter or not tasks else tasks.training)
    _look_at_engine(settings, model, tasks)
    if settings.model == TINY or model:
        context = any_kind(settings.engine).context(model) if model else TINY_CONTEXT
        fit_max_tokens(settings, overrides, context)
    return [*notes, f"not looked at, as a start would fetch it: {', '.join(fetched)}"] if fetched else notes


def _look_at_engine(settings: RunSettings, model: Path | None, tasks: RunTasks | None) -> None:
    """Raise SettingsError or ServerSettingError for an engine that no machine can have. Warn of what a start
    on this machine would lack: the plan may be for others. `model`, `tasks`: None if they are not here yet.
    """

    def look(engine: EngineKind) -> None:
        refuse_two_precisions(settings, engine)
        if model is not None and settings.rl_phase != "update":
            targets = settings.trainer.lora.targets if settings.trainer.lora.rank else None
            engine.check_model(settings.model, model, count_parameters(model), targets)
        if tasks is not None and (model is not None or settings.model == TINY):
            refuse_pictures(settings, engine, model, tasks)
            refuse_unrecorded(settings, engine, model)

    engine_here = engine_of(settings, MASTER)
    elsewhere = engine_kind(settings.engine, 0 if engine_here.gpus else 1)
    errors = [_error_of(partial(look, engine)) for engine in (engine_here, elsewhere)]
    if errors[0] and errors[1]:
        raise errors[0]
    looks = [lambda: check_sinks(settings.metrics)]
    generates = settings.rl_phase != "update" and settings.engine.url is None
    absent = [errors[0], *map(_error_of, [*looks, engine_here.check] if generates else looks)]
    for error in filter(None, absent):
        log.warning("a start on this machine would be refused: %s", error)
    if not generates or model is None or any(absent):
        return
    if settings.engine.args:
        print("asking the engine about engine.args: up to half a minute", file=sys.stderr, flush=True)
    if reason := engine_here.refusal(model):
        raise SettingsError(f"engine.args: vLLM refuses them: {reason}")


def _error_of(look: Callable[[], None]) -> SettingsError | ServerSettingError | None:
    try:
        look()
    except (SettingsError, ServerSettingError) as error:
        return error
    return None


def _is_of_disk(model: str, data_path: str | None) -> bool:
    """Return whether a model is no name on Hugging Face: a path, or a directory below `data_path`."""
    return is_path(model) or any(map(is_directory, (Path(model), Path(data_path or ".", model))))


def _load_local(settings: RunSettings) -> None:
    """Load the functions, and those tasks that are not fetched."""
    load_functions(settings.rollout.scoring, settings.rollout.environment)
    if not settings.tasks.startswith(HUB):
        load_training_tasks(settings)
    if not (settings.eval_tasks or "").startswith(HUB):
        load_eval_tasks(settings)
    sets = {name: each for name, each in settings.eval.sets.items() if not each.tasks.startswith(HUB)}
    load_eval_sets(settings.model_copy(update={"eval": settings.eval.model_copy(update={"sets": sets})}))


def _refuse_changes(root: Path, settings: RunSettings, model: Path | None, tasks: TaskSet | None) -> None:
    """Raise SettingsError for what may not change in the run at `root`, as far as it is known. `model`,
    `tasks`: None if they would be fetched first. A model of the same name is not read again.
    """
    run = read_run_json(RunDir(root))
    first_model, first_tasks = (run["fixed"][key]["name"] for key in ("model", "tasks"))
    digest, tasks_digest = "", tasks.digest if tasks else ""
    if model is not None and settings.model != first_model:
        digest = policy_digest(known_files.checksums(model, model_files(model)))
    elif model is None and settings.model not in (TINY, first_model):
        is_unknown = _is_of_disk(first_model, settings.data_path)  # it may be what has this name
        digest = "" if is_unknown else settings.model  # on Hugging Face
    if settings.tasks.startswith(HUB) and first_tasks.startswith(GENERATED):
        tasks_digest = settings.tasks
    fixed = fixed_by(settings, digest, tasks_digest)
    unknown = set[str]() if tasks_digest else {"tasks"}
    unknown |= set() if digest or settings.model == TINY else {"model"}
    refuse_changes(run, {name: value for name, value in fixed.items() if name not in unknown})
