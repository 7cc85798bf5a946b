"""`run export`: copy a checkpoint into a directory that the Hugging Face Hub, or a server, can take."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.console.commands.model_card import CARD, hub_name, model_card
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete, is_part_of_model
from coordinator.settings.tree import SettingsError
from coordinator.start.run_json import find_run
from rollout.engines.model_dir import ADAPTER_CONFIG, CONTENT, PROBE, is_adapter
from rollout.settings import TINY
from rollout.storage import hashing
from trainer.documents import PROOF

DTYPES = ("bfloat16", "float16", "float32")
"""Number types that a whole model can be written in."""


def export(
    root: Path, iteration: int | None, target: Path, merge: bool = False, dtype: str | None = None
) -> list[str]:
    """Copy the model of `iteration` (None: the newest) into `target`, with a model card; return file names.
    `merge`: an adapter is added to its base model. `dtype`: the number type of a whole model's weights; None:
    as they are saved, or that of the base.

    Every copy is verified. `target` appears complete or, after a SettingsError, not at all.
    """
    run_dir = RunDir(root)
    run = find_run(root)
    checkpoints = published.checkpoints(run_dir)
    iteration = iteration or max(checkpoints, default=0)
    if iteration not in checkpoints:
        them = ", ".join(map(str, checkpoints))
        choices = (
            f"there {'is' if len(checkpoints) == 1 else 'are'} {them}" if checkpoints else "there is none yet"
        )
        raise SettingsError(f"--iteration {iteration}: {root} has no such checkpoint; {choices}")
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(Path.cwd())):
        raise SettingsError(f"-o {target}: is there already; give a new directory")
    source = run_dir.checkpoint(iteration)
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: give {', '.join(DTYPES)}")
    if dtype is not None and is_adapter(source) and not merge:
        problem = f"iteration {iteration} is an adapter; add --merge for a whole model, or leave --dtype out"
        raise SettingsError(f"--dtype {dtype}: {problem}")
    try:
        result = published.read_result(source)
    except Incomplete as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise SettingsError(f"--iteration {iteration}: {reason}; export another one") from None
    facts = result.files
    if merge and not is_adapter(source):
        if not result.settings.lora.rank:
            raise SettingsError(f"--merge: iteration {iteration} of {root} is a whole model; leave it out")
        merge = False  # no step was taken yet, so there is nothing to add
    names = sorted(
        name for name in facts if is_part_of_model(name) and name not in {PROBE, CONTENT, CARD, PROOF}
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            inside = Path(temporary) / target.name
            inside.mkdir()
            _copy(source, inside, {name: facts[name] for name in names})
            if merge:
                inside = merge_adapter(inside, Path(temporary) / f"{target.name}.sum", dtype)
                for name in (CARD, PROOF):  # of the base model, if that was exported too
                    (inside / name).unlink(missing_ok=True)
                names = sorted(
                    file.relative_to(inside).as_posix() for file in inside.rglob("*") if file.is_file()
                )
            else:
                _name_base(inside, run)
                if dtype is not None:
                    _cast(inside, dtype)
            (inside / CARD).write_text(model_card(run_dir, run, iteration, inside))
            mode = (inside / CARD).stat().st_mode
            for file in inside.rglob("*.safetensors"):  # the library makes new ones for their owner alone
                file.chmod(mode)
            proof = [PROOF] if PROOF in published.names(source) else []  # older versions have written none
            for name in proof:
                shutil.copy(source / name, inside / name)
            os.replace(inside, target)
    except OSError as error:
        raise SettingsError(f"-o {target}: {error.strerror or error}; give another directory") from None
    return [*names, CARD, *proof]


def merge_adapter(adapter: Path, target: Path, dtype: str | None = None) -> Path:
    """Make a model of an adapter and its base at `target`, and return that. SettingsError if it cannot be."""
    reason = _failure("merge", str(adapter), str(target), *([dtype] if dtype else []))
    if reason is not None:
        raise SettingsError(f"{adapter} is an adapter, and could not be added to its base model: {reason}")
    return target


def _cast(model: Path, dtype: str) -> None:
    """Write the weights of a whole model in another number type, in place."""
    reason = _failure("cast", str(model), dtype)
    if reason is not None:
        raise SettingsError(f"--dtype {dtype}: the weights could not be written so: {reason}")


def _failure(program: str, *arguments: str) -> str | None:
    """Run a program of trainer.checkpoint, which loads torch; return why it failed, or None."""
    argv = [sys.executable, "-P", "-m", f"trainer.checkpoint.{program}", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (done.stderr.splitlines() or ["it ended without a word"])[-1] if done.returncode else None


def _copy(source: Path, target: Path, expected: Mapping[str, Any]) -> None:
    """Copy the files `expected`; SettingsError for one that is missing or does not have these facts."""
    names = [name for name in expected if (source / name).is_file()]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
    copied = hashing.checksums(target, names=names)
    if damaged := [name for name, facts in expected.items() if copied.get(name) != facts]:
        raise SettingsError(
            f"{source / damaged[0]} is missing or damaged; nothing was exported, export another iteration"
        )


def _name_base(directory: Path, run: dict[str, Any]) -> None:
    """Write the name of the base model into an adapter, in place of a path on a node: on the Hub if it is
    known, else as the user gave it.

    The built-in model keeps its path in the run: no other program can load it by name.
    """
    path, model = directory / ADAPTER_CONFIG, run["fixed"]["model"]["name"]
    if path.is_file() and not model.startswith(TINY):
        config = json.loads(path.read_bytes()) | {"base_model_name_or_path": hub_name(model) or model}
        path.write_text(json.dumps(config, indent=2) + "\n")
