"""run.json: the run's id and format, and what may not change between two starts."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import Inputs
from rollout.settings import TINY, RolloutSettings
from rollout.storage import files, once
from trainer.settings import LoraSettings

SAVED_EVERY = ((20 * 10**9, 10), (10**9, 2))
"""Pairs (bytes, n): an optimizer's state above so many bytes is saved in the background, with every n-th
checkpoint, unless the user says how often."""

NOT_STARTED = "--log-path {0}: no master has started there yet; start one: run --log-path {0}"
LOOKED_AT, SHOWN = 100, 5
"""So many directories beside an absent one are looked at, and so many runs named."""


def new_run_id() -> str:
    """Return an id that no other run has."""
    return secrets.token_hex(6)


def has_run(root: Path) -> bool:
    """Return whether a run was begun in a directory."""
    return files.is_directory(root) and RunDir(root).run_json.name in files.listing(root)


def find_run(root: Path) -> dict[str, Any]:
    """Return the run.json of the run at `root`; SettingsError if there is none, or one of another format."""
    if not has_run(root):
        raise no_run(root)
    return read_run_json(RunDir(root))


def run_to_help(log_path: Path | None) -> Path:
    """Return the run directory of a guest; SettingsError if none was named, and none is at the usual place: a
    guest would wait for it.
    """
    root = Path("runs/default").absolute() if log_path is None else log_path.absolute()
    if log_path is None and not has_run(root):
        raise SettingsError(f"--log-path DIR is missing: the run to help (none is at {root})")
    return root


def no_run(root: Path) -> SettingsError:
    """Return the error of a command that looks for a run where none is: what is there, and which are near."""
    is_there = root.name in files.listing(root.parent) if files.is_directory(root.parent) else False
    if is_there and not files.is_directory(root):
        return SettingsError(f"--log-path {root}: is a file; give the directory of a run")
    place = "no run.json" if is_there else "no such directory"
    return SettingsError(
        f"--log-path {root}: no run there ({place}{runs_near(root)}); give the directory of a run"
    )


def runs_near(root: Path) -> str:
    """Return which runs are in a directory that is none itself, or beside one that is not there, as the end
    of a sentence; an empty text: none.

    What a directory does not list is not looked up: a client may cache "no such file" for a minute.
    """
    if not files.is_directory(root.parent):
        return ""
    names = files.listing(root.parent)
    is_inside = root.name in names and files.is_directory(root)
    place, names = (root, files.listing(root)) if is_inside else (root.parent, names)
    runs = [name for name in sorted(names)[:LOOKED_AT] if has_run(place / name)]
    word = "are the runs" if len(runs) > 1 else "is the run"
    return f"; {'in' if is_inside else 'beside'} it {word} {', '.join(runs[:SHOWN])}" if runs else ""


def read_run_json(run_dir: RunDir) -> dict[str, Any]:
    """Read run.json of this format; SettingsError for another."""
    try:
        run = json.loads(files.read(run_dir.run_json))
    except ValueError as error:
        raise SettingsError(
            f"{run_dir.run_json} is damaged ({error}); restore it or use another log path"
        ) from None
    run_format = run.get("format") if isinstance(run, dict) else None  # pyright: ignore
    if run_format != FORMAT:
        raise SettingsError(
            f"--log-path {run_dir.root} holds a run of format {run_format}, this version writes "
            f"format {FORMAT}; use another log path"
        )
    return run  # pyright: ignore[reportUnknownVariableType]


def fixed_of(settings: RunSettings, inputs: Inputs) -> dict[str, Any]:
    """Return the facts that may not change between two starts, each with the name that a person gives it."""
    return fixed_by(settings, inputs.model_digest, inputs.tasks.digest)


def fixed_by(settings: RunSettings, model_digest: str, tasks_digest: str) -> dict[str, Any]:
    """Return the same by the digests of model and tasks."""
    tiny = f"{TINY}, tiny.warmup_steps={settings.tiny.warmup_steps}"
    model = settings.model if model_digest else tiny
    seed = str(settings.rollout.seed)
    return {  # the seed first: the built-in tasks and model follow from it
        "rollout.seed": {"name": seed, "digest": seed},
        "model": {"name": model, "digest": model_digest or tiny},
        "tasks": {"name": settings.tasks, "digest": tasks_digest, **_prompts(settings.rollout)},
        "trainer.lora": _adapters(settings.trainer.lora),
    }


def _prompts(rollout: RolloutSettings) -> dict[str, str]:
    """Return the settings that change what the tasks are, for people."""
    names = ("system_prompt", "max_prompt_tokens")
    typed = [
        f"rollout.{name}={value!r:.60}" for name in names if (value := getattr(rollout, name)) is not None
    ]
    return {"with": " ".join(typed)} if typed else {}


def _adapters(lora: LoraSettings) -> dict[str, str]:
    name = f"rank={lora.rank} alpha={lora.alpha:g} targets={lora.targets}" if lora.rank else "rank=0"
    name += f" base_dtype={lora.base_dtype}" if lora.base_dtype != "auto" else ""
    return {"name": name, "digest": name}


def refuse_changes(run: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise SettingsError if something is not what the run, whose run.json this is, was started with."""
    for key, now in fixed.items():
        started_with = run["fixed"][key]
        if started_with["digest"] != now["digest"]:
            was, name = (" with ".join(filter(None, (x["name"], x.get("with")))) for x in (started_with, now))
            differs = "other content or columns" if key == "tasks" else "other content"
            content = f" (same name, {differs})" if was == name else ""
            raise SettingsError(
                f"{loading.option_name(key)} is {name}{content}, but this run was started with "
                f"{was}; to start over, use another log path"
            )


def refuse_fewer_iterations(root: Path, settings: RunSettings) -> None:
    """Raise SettingsError if the run at `root` has done more iterations than it is to have."""
    done = FinishedIterations(RunDir(root)).look().last(settings.kind)
    if settings.iterations is not None and settings.iterations < done:
        raise SettingsError(
            f"--iterations {settings.iterations}: this run has done {done} already; give more, e.g. "
            f"--iterations {2 * done}"
        )


def with_save_interval(settings: RunSettings, run: Mapping[str, Any]) -> RunSettings:
    """Return the settings with the trainer.save_interval that the run's first start has chosen by the size of
    the state, unless the user gives one. `run` is run.json.
    """
    trainer = settings.trainer
    if trainer.save_interval is None:
        value = run.get("save_interval", 1) if trainer.keep_alive else 1
        settings = loading.overlay(settings, {"trainer.save_interval": value})
    return settings


def chosen_save_interval(state_bytes: int) -> int:
    """Return how many checkpoints apart a first start has an optimizer's state of so many bytes saved."""
    return next((every for above, every in SAVED_EVERY if state_bytes > above), 1)


def make_run(run_dir: RunDir, fixed: Mapping[str, Any], state_bytes: int) -> dict[str, Any]:
    """Return run.json, which is made if it is missing; SettingsError if it says something else.

    `state_bytes`: the size of the optimizer's state.
    """
    files.make_directory(run_dir.root)
    run = {
        "run_id": new_run_id(),
        "format": FORMAT,
        "fixed": fixed,
        "save_interval": chosen_save_interval(state_bytes),
    }
    is_there = run_dir.run_json.name in files.listing(run_dir.root)
    if not is_there and once.create_once(run_dir.run_json, json.dumps(run, indent=1).encode()):
        return run
    run = read_run_json(run_dir)
    refuse_changes(run, fixed)
    return run
