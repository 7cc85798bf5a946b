"""The origin of an iteration's samples: fixed when it is opened, whatever later starts are given."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name, parse_part_name
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.parts import has_finished
from coordinator.keeping import resume
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import eval_sets
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase, phases_of
from coordinator.settings.loading import option_name, show
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import SECTION
from coordinator.start.inputs import Inputs, difference
from coordinator.start.user_functions import Functions, load_functions
from rollout.eval_settings import EvalSettings
from rollout.origin import Code, Origin, Sampling, origin_document
from rollout.part_file import DamagedPart, PartHeader, decode_part
from rollout.settings import SELF
from rollout.storage import files

KINDS: tuple[Kind, ...] = ("train", "eval")
OWN = ""
"""Key, where others are set names, of the reward and environment of training and of --eval-tasks."""
SAMPLING = {
    field.name: {"n": "samples_per_task"}.get(field.name, field.name)
    for field in fields(Sampling)
    if field.name not in ("seed", "more")  # a group's own, a request's own
}
"""The settings of sampling, by the field of Sampling."""
EVAL_SAMPLING = [name for name in SAMPLING if name in EvalSettings.model_fields and name != "max_tokens"]
"""Fields of Sampling that an evaluation has settings for, but for `max_tokens`: training's, by default."""
_BEFORE = Sampling()
"""What holds for a field that an older iteration.json has not."""


def chosen(settings: RunSettings, inputs: Inputs) -> dict[str, Any]:
    """Return the sampling, rewards and environments that the settings name, for a new iteration.json."""
    train, evaluation = settings.rollout, settings.eval
    sampling = Sampling(**{field: getattr(train, name) for field, name in SAMPLING.items()})
    eval_sampling = replace(
        sampling,
        n=evaluation.samples_per_task,
        max_tokens=evaluation.max_tokens or train.max_tokens,
        **{name: getattr(evaluation, name) for name in EVAL_SAMPLING},
    )
    sets = eval_sets.chosen_sets(settings, inputs, sampling)
    return {
        "sampling": origin_document(sampling),
        "eval_sampling": origin_document(eval_sampling),
        "reward": asdict(inputs.functions.reward),
        "environment": asdict(inputs.functions.environment),
        **({"eval_sets": sets} if sets else {}),
    }


def origin_of(opened: Mapping[str, Any], kind: Kind, policy: str, policy_iteration: int) -> Origin:
    """Return the Origin of an iteration's parts; `opened` is its iteration.json."""
    sampling = opened["sampling" if kind == "train" else "eval_sampling"]
    origin: dict[str, Any] = {"policy": policy, "policy_iteration": policy_iteration, "sampling": sampling}
    if kind == "eval":
        origin |= {name: asdict(code) for name, code in eval_sets.joined(opened).items()}
    return Origin.from_document({**opened, **origin})


def made_with(iteration: Iteration, kind: Kind, functions: Mapping[str, Functions] | None = None) -> Origin:
    """Return the Origin of an iteration's parts: with the code that it was opened with, or, if given, with
    that of `functions` (see functions_of).
    """
    header = iteration.header
    origin = origin_of(iteration.opened, kind, header["policy"], header["policy_iteration"])
    if functions is None:
        return origin
    return replace(origin, **_code(iteration.opened, kind, functions))


def _code(opened: Mapping[str, Any], kind: Kind, functions: Mapping[str, Functions]) -> dict[str, Code]:
    """Return the code of `functions` as the parts of a kind have it."""
    unnamed = functions[OWN]
    if kind == "train":
        return {"reward": unnamed.reward, "environment": unnamed.environment}
    return eval_sets.joined(opened, functions)


def changes(opened: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that have changed since an iteration was opened: `name=old (now new)`.

    `opened` is its iteration.json, `now` would be the content today. Of code only the name is a setting.
    """
    sets, sets_now = eval_sets.texts(opened), eval_sets.texts(now)
    teachers = (opened.get("teacher"), now.get("teacher"))
    values: dict[str, tuple[Any, Any]] = {
        **{
            f"{section}.{SAMPLING[name]}": (opened[key].get(name, getattr(_BEFORE, name)), now[key][name])
            for section, key, names in (
                ("rollout", "sampling", SAMPLING),
                ("eval", "eval_sampling", ("n", "max_tokens", *EVAL_SAMPLING)),
            )
            for name in names
        },
        "rollout.reward": (opened["reward"]["name"], now["reward"]["name"]),
        "rollout.environment": (opened["environment"]["name"], now["environment"]["name"]),
        "rollout.tasks_per_iteration": (opened["groups"], now["groups"]),
        "rollout.dynamic_sampling": (opened["replace_flat"], now["replace_flat"]),
        "rollout.segment_tokens": (opened.get("segment_tokens"), now.get("segment_tokens")),
        # One that has moved is asked where it is now.
        "rollout.teacher": (None, None) if are_servers(*teachers) else teachers,
        "rollout.teachers": (sorted(opened.get("teachers", {})), sorted(now.get("teachers", {}))),
        "rollout.teacher_template": (opened.get("teacher_template"), now.get("teacher_template")),
        "cluster.max_async_level": (opened.get("max_async_level", 0), now["max_async_level"]),
        **{name: (sets.get(name), sets_now.get(name)) for name in sorted({*sets, *sets_now})},
    }
    return [
        f"{option_name(key)}={_shown(opened_value)} (now {_shown(present_value)})"
        for key, (opened_value, present_value) in values.items()
        if opened_value != present_value
    ]


def are_servers(*teachers: str | None) -> bool:
    """Return whether each of these values of rollout.teacher is the address of a server."""
    return all(teacher and not teacher.startswith(SELF) for teacher in teachers)


def _shown(value: Any) -> str:
    """Return a value as a person types it; lists and dicts, whose strings may hold line ends, as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else show(value)


def is_begun(run_dir: RunDir, iteration: int) -> bool:
    """Return whether groups of an iteration are finished, so that it has to end as it was begun."""
    names = published.names(run_dir.trajectories("train", iteration))
    return run_dir.manifest("train", iteration).name in names or any(
        _newest_begun(run_dir, kind, iteration) for kind in KINDS
    )


def _newest_begun(run_dir: RunDir, kind: Kind, iteration: int) -> PartHeader | None:
    """Return the header of the newest part with a finished group that no manifest is made of yet."""
    directory = run_dir.trajectories(kind, iteration)
    names = published.names(directory)
    if run_dir.manifest(kind, iteration).name in names:
        return None
    for part in sorted(filter(None, map(parse_part_name, names)), reverse=True):
        try:
            header, groups = decode_part(files.read(directory / part.name))
        except (FileNotFoundError, DamagedPart):
            continue
        if has_finished(groups):  # with tombstones alone the iteration may be broken, and be mended
            return header
    return None


# ---- the code of an open iteration


def functions_of(opened: Mapping[str, Any]) -> dict[str, Functions]:
    """Load the reward and the environment of an iteration (OWN), then those of its named sets by their names;
    SettingsError says what is wrong with which.
    """
    functions = {OWN: load_functions(opened["reward"]["name"], opened["environment"]["name"])}
    for eval_set in eval_sets.of_opened(opened):
        functions[eval_set.name] = load_functions(
            eval_set.reward.name, eval_set.environment.name, eval_set.section
        )
    return functions


def codes_of(functions: Mapping[str, Functions]) -> dict[str, Code]:
    """Return the Code behind each name of functions_of, by setting."""
    codes = functions[OWN].codes()
    for name, loaded in functions.items():
        codes |= loaded.codes(f"{SECTION}{name}") if name != OWN else {}
    return codes


def agreed_functions(node: Node, iteration: Iteration) -> dict[str, Functions]:
    """Load the rewards and environments as functions_of; the run ends if they are not the master's."""
    functions = functions_of(iteration.opened)
    code = {key: Code(**entry) for key, entry in iteration.header["code"].items()}
    if problem := difference(codes_of(functions), code, node.record.master_host):
        raise NodeEnded(Exit.FAILED, node.messages.failure(SettingsError(problem)), "failed")
    return functions


def refuse_changed_code(run_dir: RunDir, settings: RunSettings) -> None:
    """Raise SettingsError if an open iteration would get samples by other code than it has already."""
    if Phase.TRAIN_ROLLOUT not in phases_of(settings.kind):
        return
    first = resume.next_iteration(FinishedIterations(run_dir), settings)
    numbers = map(parse_iteration_name, published.names(run_dir.trajectories("train", first).parent))
    for number in sorted(number for number in numbers if number is not None and number >= first):
        opened = published.read_json(run_dir.iteration_json(number))
        is_generated = resume.resume_at(run_dir, settings, number) > Phase.EVAL_ROLLOUT
        if opened is not None and is_begun(run_dir, number) and not is_generated:
            _refuse_other_code(run_dir, number, opened)


def _refuse_other_code(run_dir: RunDir, number: int, opened: Mapping[str, Any]) -> None:
    again = f"or remove the iteration: run cleanup --iteration {number} --log-path {run_dir.root}"
    try:
        functions = functions_of(opened)
    except SettingsError as error:
        raise SettingsError(
            f"iteration {number} is open and was begun with that, but {error}; bring it back, {again}"
        ) from None
    for kind in KINDS:
        now = _code(opened, kind, functions)
        for key, old_code in _newest_code(run_dir, kind, number).items():
            if old_code.digest != now[key].digest:
                option = option_name(f"rollout.{key}")
                raise SettingsError(
                    f"the code of {option} {old_code.name} has changed (digest {now[key].digest}) "
                    f"since groups of iteration {number} were made with it (digest {old_code.digest}); bring "
                    f"the code back, or add --accept-code-change to finish the iteration with both, {again}"
                )


def _newest_code(run_dir: RunDir, kind: Kind, iteration: int) -> dict[str, Code]:
    """Return the code of the newest finished groups that no manifest is made of yet: `reward`,
    `environment`; {} without one.
    """
    header = _newest_begun(run_dir, kind, iteration)
    return {"reward": header.reward, "environment": header.environment} if header else {}
