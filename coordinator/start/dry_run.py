"""`--dry-run`: the settings, and what they name, shown, and looked at as a start would."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER, RunDir
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import refuse_training_tasks
from coordinator.start.inputs import base_model_dir, engine_of, is_path, load_named
from coordinator.start.last_settings import changes
from coordinator.start.odd_settings import odd_settings
from coordinator.start.refusals_of_tasks import (
    look_at_text,
    refuse_no_evaluation,
    refuse_unrendered,
    without_longer,
)
from coordinator.start.request import StartRequest
from coordinator.start.start import last_start, resume_given
from coordinator.start.user_functions import load_functions
from coordinator.start.whole_model import refuse_incomplete
from rollout.engines.model_dir import WeightsError
from rollout.settings import TINY
from rollout.storage.files import is_directory
from rollout.tasks.file_kinds import HUB, RowError, hub_parts
from rollout.tasks.task_set import TaskError

log = logging.getLogger(__name__)


def show(request: StartRequest, looks: bool) -> int:
    """Print the settings that a start of the master would go by, and on stderr what that changes. With
    `looks`, SettingsError for what they name if a start would refuse it.
    """
    overrides = resume_given(request)
    settings = build(overrides)
    print(json.dumps(settings.model_dump(mode="json"), indent=2), flush=True)
    for change in changes(last_start(request.root), settings):
        print(change, file=sys.stderr)
    is_master = request.rank == MASTER  # a worker takes its settings from the master
    if looks and is_master and (fetched := check_named(settings, overrides)):
        print(f"not looked at, as a start would fetch it: {fetched}", file=sys.stderr)
    return 0


def check_named(settings: RunSettings, overrides: Mapping[str, Any]) -> str | None:
    """Check rewards, environments, tasks and model, whatever engine and GPUs this machine has. SettingsError
    says what is wrong with which. Return what is not looked at, as a start would fetch it first.
    """
    sources = [settings.tasks, settings.eval_tasks, *(each.tasks for each in settings.eval_sets.values())]
    fetched = [source for source in sources if source and source.startswith(HUB)]
    try:
        for source in fetched:
            hub_parts(source)
    except RowError as error:
        raise SettingsError(str(error)) from None
    if not (settings.model == TINY or is_path(settings.model) or is_directory(Path(settings.model))):
        fetched.append(settings.model)
    if fetched:
        load_functions(settings.rollout.reward, settings.rollout.environment)
        return ", ".join(fetched)
    try:
        named = load_named(settings, overrides)
    except TaskError as error:
        raise SettingsError(str(error)) from None
    refuse_no_evaluation(settings, overrides, bool(named.eval_tasks or named.eval_sets))
    refuse_training_tasks(named.tasks, named.eval_tasks if settings.eval_tasks else None, named.eval_sets)
    for text in odd_settings(settings, overrides):
        log.warning("%s", text)
    if settings.model != TINY:
        model, tasks = base_model_dir(settings, RunDir(Path())), named[1:]
        try:
            refuse_incomplete(settings, model)
            tasks = without_longer(settings, model, *tasks)
        except WeightsError as error:
            raise SettingsError(f"--model {settings.model}: {error}") from None
        refuse_unrendered(settings, model, *tasks)
        if settings.rl_phase != "update":
            code = [text for _file, text in named.functions.sources.values()]
            look_at_text(settings, model, *tasks, engine_of(settings, MASTER), code)
    return None
