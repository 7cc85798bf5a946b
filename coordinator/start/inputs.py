"""Inputs that the settings name, loaded or found on this machine: tasks, reward, environment, model, GPUs."""

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.directory.layout import RunDir
from coordinator.machine.gpus import count_gpus
from coordinator.machine.interpreter import lacks_flagpost
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start import refusals_of_models, refusals_of_tasks
from coordinator.start.eval_tasks import EvalSets, RunTasks, find_data, load_eval_sets, load_eval_tasks
from coordinator.start.texts_of_tasks import without_longer
from coordinator.start.user_functions import Functions, load_functions
from rollout.engines.hub import NotFetched, fetch_model
from rollout.engines.kinds.choice import any_kind, engine_kind
from rollout.engines.kinds.kind import EngineKind, ServerSettingError
from rollout.engines.model_dir import WeightsError, model_files, policy_digest, tensor_names
from rollout.engines.model_facts import count_parameters
from rollout.engines.special_tokens import read_special_tokens
from rollout.environments.demonstration import check_demonstrations
from rollout.environments.labelled import check_labels
from rollout.environments.preference import check_preferences
from rollout.origin import Code
from rollout.settings import TINY
from rollout.settings_tree import Mark, marked
from rollout.storage import files, known_files
from rollout.storage.files import is_directory
from rollout.storage.hashing import FileFacts
from rollout.tasks.sampling import check_sampling
from rollout.tasks.task_set import TaskError, TaskSet, load_tasks
from trainer.memory import Shape

CHECKS: dict[str, Callable[[TaskSet], None]] = {
    "demonstration": check_demonstrations, "preference": check_preferences, "labelled": check_labels
}  # fmt: skip
"""What the environments whose answers are written need of the training tasks."""
NODE_LOCAL = {*marked(RunSettings, Mark.PER_MACHINE)}
"""Settings about one machine."""
TINY_PARAMETERS, TINY_CONTEXT = 341_120, 1024
"""Parameters and context of builtin:tiny, which is not made yet when a run starts."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
STATE_BYTES = 12
"""Bytes that a state has of each trained parameter: its weight in float32, and two moments."""


@dataclass(frozen=True)
class Inputs:
    """What the settings name, loaded."""

    local: Mapping[str, Any]
    """This node's own values of NODE_LOCAL settings."""
    tasks: TaskSet
    eval_tasks: TaskSet | None
    eval_sets: EvalSets
    functions: Functions
    model_digest: str
    """The digest of the model that the run starts from; empty for builtin:tiny, which is not made yet."""
    model_files: Mapping[str, FileFacts]
    """The files of that model; none for builtin:tiny."""
    loaded_for: RunSettings
    parameters: int = TINY_PARAMETERS
    """All parameters of the base model."""
    trained: int = TINY_PARAMETERS
    """Parameters trained without adapters (trainer.freeze_vision)."""
    context: int | None = TINY_CONTEXT
    """The longest sequence that the run's engines take, in tokens; None where it is not certain."""
    has_end: bool = True
    """Whether the model has a token that ends a sequence."""

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer's state of a whole model; 0 for what is small: builtin:tiny, adapters."""
        is_small = not self.model_files or self.loaded_for.trainer.lora.rank
        return 0 if is_small else STATE_BYTES * self.trained

    def codes(self) -> dict[str, Code]:
        """Return the Code behind each setting that may change between two starts, by setting."""
        tasks, source = self.eval_tasks, self.loaded_for.evaluation_tasks
        evaluation = {"eval_tasks": Code(source, tasks.digest)} if tasks and source else {}
        for eval_set in self.eval_sets.values():
            evaluation |= eval_set.codes()
        return {**self.functions.codes(), **evaluation}

    def renewed(self, settings: RunSettings, master_codes: Mapping[str, Code]) -> "Inputs":
        """Return the Inputs of the master's `settings`, after another start of it; `master_codes`: its codes.

        A module is not loaded twice: other modules may hold on to what it was. The training tasks and the
        model are the same at every start. SettingsError says what is wrong.
        """
        rollout = settings.rollout
        now = replace(
            self, functions=load_functions(rollout.scoring, rollout.environment), loaded_for=settings
        )
        own_codes = now.codes()
        names = {name for name in (*own_codes, *master_codes) if name.startswith("eval")}
        if any(own_codes.get(name) != master_codes.get(name) for name in names):
            eval_tasks, eval_sets = load_eval_tasks(settings), load_eval_sets(settings)
            if rollout.max_prompt_tokens is not None:
                model = base_model_dir(settings, RunDir(Path()))
                tasks = RunTasks(self.tasks, eval_tasks, eval_sets)
                _, eval_tasks, eval_sets = without_longer(settings, model, tasks)
            now = replace(now, eval_tasks=eval_tasks, eval_sets=eval_sets)
        return now

    def localize(self, published: RunSettings) -> RunSettings:
        """Return a record's settings, with this node's own over them."""
        return loading.overlay(published, self.local)


def difference(own_codes: Mapping[str, Code], master_codes: Mapping[str, Code], where: str) -> str | None:
    """Say which setting names something else here than on the host `where`, and what to do; None: none."""
    for key, code in own_codes.items():
        if key in master_codes and code.digest != master_codes[key].digest:
            return (
                f"{loading.option_name(key)} {code.name} is not the same on {socket.gethostname()} (digest "
                f"{code.digest}) as on {where}, the master's host (digest {master_codes[key].digest}): give "
                "all nodes the same files, then start them again"
            )
    return None


def python_of(settings: RunSettings, machine: int) -> str:
    """Return the Python that runs the engine and the trainer of a machine; SettingsError if this machine does
    not have it, or it has not the same flagpost.
    """
    group = settings.cluster.group_of(machine)
    if group is None or group.program is None:
        return sys.executable
    if lacks := lacks_flagpost(group.program, group.env):
        name = next(name for name, other in settings.cluster.groups.items() if other is group)
        where = f"rank {machine} ({socket.gethostname()})"
        raise SettingsError(f"cluster.groups.{name}.python={group.python} on {where}: {lacks}")
    return group.program


def engine_of(settings: RunSettings, machine: int) -> EngineKind:
    """Return the engine of a machine, if this is it; SettingsError as python_of."""
    return engine_kind(settings.engine, count_gpus(), python_of(settings, machine))


def load_inputs(settings: RunSettings, overrides: Mapping[str, Any], machine: int = 0) -> Inputs:
    """Tasks, reward, environment; SettingsError says what is wrong with which. `machine`: its number, as in
    --worker.
    """
    engine = engine_of(settings, machine)
    refuse_absent_directories(settings)
    if settings.data_path is not None:
        os.environ["HF_HOME"] = str(Path(settings.data_path) / "huggingface")
    refusals_of_models.refuse_two_precisions(settings, engine)
    processes = local_processes(settings)
    for setting in ("tensor_parallel_size", "context_parallel"):
        size = getattr(settings.trainer, setting)
        if settings.rl_phase != "rollout" and processes % size:
            raise SettingsError(
                f"trainer.{setting}={size} does not divide the {processes} training processes of this node; "
                "choose a divisor, or trainer.processes_per_node"
            )
    refusals_of_models.refuse_wrong_teacher(settings)
    try:
        if settings.rl_phase != "update":
            any_kind(settings.engine).check_arguments()  # also where this node has no vLLM
            engine.check()
        functions, tasks = load_named(settings, overrides)
        model = None if settings.model == TINY else base_model_dir(settings, RunDir(Path()))
        refusals_of_tasks.refuse_pictures(settings, engine, model, tasks)
        refusals_of_models.refuse_unrecorded(settings, engine, model)
        base_files: dict[str, FileFacts] = {}
        model_digest, parameters, context, has_end = "", TINY_PARAMETERS, TINY_CONTEXT, True
        trained = parameters
        if model is not None:
            refusals_of_models.refuse_quantised(settings, model)
            refusals_of_models.refuse_undivided(settings, model)
            parameters = count_parameters(model)
            shapes = {name: shape for name, (_, shape) in tensor_names(model).items()}
            trained = parameters - Shape.from_tensors(shapes, 0, settings.trainer.freeze_vision).frozen
            if settings.rl_phase != "update":
                lora = settings.trainer.lora
                engine.check_model(settings.model, model, parameters, lora.targets if lora.rank else None)
            refusals_of_tasks.refuse_unrendered(settings, model, tasks)
            tasks = without_longer(settings, model, tasks)
            context = any_kind(settings.engine).context(model)
            has_end = refusals_of_models.has_end(settings, read_special_tokens(model))
            base_files = known_files.checksums(model, model_files(model))
            model_digest = policy_digest(base_files)
        return Inputs(
            local={key: value for key, value in overrides.items() if key in NODE_LOCAL},
            tasks=tasks.training,
            eval_tasks=tasks.evaluation,
            eval_sets=tasks.sets,
            functions=functions,
            model_digest=model_digest,
            model_files=base_files,
            loaded_for=settings,
            parameters=parameters,
            trained=trained,
            context=context,
            has_end=has_end,
        )
    except (TaskError, ServerSettingError) as error:
        raise SettingsError(str(error)) from None
    except WeightsError as error:
        raise SettingsError(f"--model {settings.model}: {error}") from None


def refuse_absent_directories(settings: RunSettings) -> None:
    """Raise SettingsError for a directory of this machine that is not there."""
    local_dir = settings.cluster.local_dir
    for option, path in (("--data-path ", settings.data_path), ("cluster.local_dir=", local_dir)):
        if path is not None and not is_directory(Path(path)):
            raise SettingsError(f"{option}{path}: no such directory")


def load_named(settings: RunSettings, overrides: Mapping[str, Any]) -> tuple[Functions, RunTasks]:
    """Load what the settings name of functions and tasks. Raises SettingsError or TaskError for what is not
    there, and for tasks that cannot work with the others.
    """
    functions = load_functions(settings.rollout.scoring, settings.rollout.environment)
    training = load_training_tasks(settings)
    check_sampling(training, settings.rollout)
    if (check := CHECKS.get(settings.rollout.environment)) is not None:
        check(training)
    tasks = RunTasks(training, load_eval_tasks(settings), load_eval_sets(settings))
    refusals_of_tasks.refuse_unplayed(settings, tasks)
    refusals_of_tasks.refuse_unscored(settings, tasks)
    refusals_of_tasks.refuse_unhinted(settings, training)
    refusals_of_tasks.refuse_unknown_sources(settings, training)
    return functions, tasks


def load_training_tasks(settings: RunSettings) -> TaskSet:
    """Load the tasks of --tasks; raises TaskError."""
    return load_tasks(
        find_data(settings.tasks, settings),
        seed=settings.rollout.seed,
        split="train",
        columns=settings.columns,
        directory=settings.cluster.local_dir,
        system_prompt=settings.rollout.system_prompt,
    )


def base_model_dir(
    settings: RunSettings, run_dir: RunDir, fetch: Callable[[str], Path] = fetch_model
) -> Path:
    """Return where this node has the model that the run starts from; fetches a Hugging Face id by `fetch`.
    SettingsError if it has none, or if that is an adapter.
    """
    if settings.model == TINY:
        return run_dir.base_model
    for candidate in (Path(settings.model), Path(settings.data_path or ".") / settings.model):
        if is_directory(candidate):
            refusals_of_models.refuse_run("--model", candidate, takes_adapters=False)
            refusals_of_models.refuse_adapter(settings.model, candidate)
            return candidate
    refuse_no_name(settings.model)
    if is_path(settings.model):
        raise SettingsError(f"--model {settings.model}: {_why_none(Path(settings.model))}")
    if settings.model.startswith("builtin:"):
        raise SettingsError(f"--model {settings.model}: the built-in model is {TINY}")
    try:
        fetched = fetch(settings.model)
    except NotFetched as error:
        raise SettingsError(
            f"--model {settings.model}: no such directory, and fetching it from Hugging Face failed: {error}"
        ) from None
    refusals_of_models.refuse_adapter(settings.model, fetched)
    return fetched


def refuse_no_name(model: str) -> None:
    """Raise SettingsError for what names neither a directory nor a model of Hugging Face."""
    if "://" in model or not (is_path(model) or model.startswith("builtin:") or _HUB_NAME.fullmatch(model)):
        raise SettingsError(
            f"--model {model}: is neither a directory nor a name on Hugging Face, such as Qwen/Qwen3-0.6B"
        )


def _why_none(path: Path) -> str:
    """Return why no model is at `path`, and what may be meant."""
    if files.exists(path):
        return "is a file; give the directory of a model, with its config.json"
    above = next(parent for parent in path.parents if files.exists(parent))
    missing = above / path.relative_to(above).parts[0]
    return f"no such directory (there is no {missing}){files.named_like(missing)}"


def is_path(model: str) -> bool:
    """Return whether what names a model cannot be the name of one on Hugging Face."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def local_processes(settings: RunSettings) -> int:
    """Training processes on this machine: as set, else its GPUs, else one."""
    return settings.trainer.processes_per_node or count_gpus() or 1
