"""`run export`: copy a checkpoint into a directory that the Hugging Face Hub, or a server, can take."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import measured
from coordinator.directory.published import Incomplete, is_part_of_model
from coordinator.settings.tree import SettingsError
from coordinator.start.run_json import find_run
from rollout.engines.model_dir import ADAPTER_CONFIG, CONTENT, PROBE, is_adapter
from rollout.engines.model_facts import takes_pictures
from rollout.settings import TINY
from rollout.storage import hashing
from trainer.documents import PROOF

CARD = "README.md"
DTYPES = ("bfloat16", "float16", "float32")
"""Number types of a merged model."""


def export(
    root: Path, iteration: int | None, target: Path, merge: bool = False, dtype: str | None = None
) -> list[str]:
    """Copy the model of `iteration` (None: the newest) into `target`, with a model card; return file names.
    `merge`: an adapter is added to its base model, in `dtype`; None: in that of the base.

    Every copy is verified. `target` appears complete or, after a SettingsError, not at all.
    """
    run_dir = RunDir(root)
    run = find_run(root)
    checkpoints = published.checkpoints(run_dir)
    iteration = iteration or max(checkpoints, default=0)
    if iteration not in checkpoints:
        choices = f"there are {', '.join(map(str, checkpoints))}" if checkpoints else "there is none yet"
        raise SettingsError(f"--iteration {iteration}: {root} has no such checkpoint; {choices}")
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(Path.cwd())):
        raise SettingsError(f"-o {target}: is there already; give a new directory")
    source = run_dir.checkpoint(iteration)
    if dtype is not None and (not merge or dtype not in DTYPES):
        problem = (
            f"give {', '.join(DTYPES)}" if merge else "add --merge; else the weights stay as they are saved"
        )
        raise SettingsError(f"--dtype {dtype}: {problem}")
    if merge and not is_adapter(source):
        raise SettingsError(f"--merge: iteration {iteration} of {root} is a whole model; leave it out")
    try:
        facts = published.read_result(source).files
    except Incomplete as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise SettingsError(f"--iteration {iteration}: {reason}; export another one") from None
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
            (inside / CARD).write_text(_card(run_dir, run, iteration, inside))
            proof = [PROOF] if PROOF in published.names(source) else []  # older versions have written none
            for name in proof:
                shutil.copy(source / name, inside / name)
            os.replace(inside, target)
    except OSError as error:
        raise SettingsError(f"-o {target}: {error.strerror or error}; give another directory") from None
    return [*names, CARD, *proof]


def merge_adapter(adapter: Path, target: Path, dtype: str | None = None) -> Path:
    """Make a model of an adapter and its base at `target`, and return that. SettingsError if it cannot be."""
    argv = [sys.executable, "-P", "-m", "trainer.checkpoint.merge", str(adapter), str(target)]
    done = subprocess.run([*argv, *([dtype] if dtype else [])], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it ended without a word"])[-1]
        raise SettingsError(f"{adapter} is an adapter, and could not be added to its base model: {reason}")
    return target


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
        config = json.loads(path.read_bytes()) | {"base_model_name_or_path": _hub_name(model) or model}
        path.write_text(json.dumps(config, indent=2) + "\n")


def _hub_name(model: str) -> str | None:
    """Return the name on the Hub of what --model was, if it is known: it was given, or a path in a cache of
    the Hub.
    """
    if model.startswith(("/", ".", "builtin:")):
        cached = re.search(r"/models--([^/]+)/snapshots/[^/]+/?$", model)
        return cached and cached[1].replace("--", "/", 1)
    return model


def _card(run_dir: RunDir, run: dict[str, Any], iteration: int, directory: Path) -> str:
    """Return the README.md of the model in `directory`, with the metadata that the Hub reads."""
    has_adapter = is_adapter(directory)
    model, tasks = (run["fixed"][key]["name"] for key in ("model", "tasks"))
    hub_name = _hub_name(model)
    library = "peft" if has_adapter else "transformers"
    sees = (directory / "config.json").is_file() and takes_pictures(directory)
    task = "image-text-to-text" if sees else "text-generation"
    head = [f"library_name: {library}", f"pipeline_tag: {task}", "tags: [reinforcement-learning]"]
    head += [f"base_model: {hub_name}"] if hub_name else []
    of_this_policy = [line for line in published.metrics_lines(run_dir) if measured(line) == iteration]
    following: dict[str, Any] = of_this_policy[0] if of_this_policy else {}
    facts = {
        "Started from": hub_name or Path(model).name,
        "Tasks": Path(tasks).name,
        "Iterations of training": iteration,
        "Evaluation reward": following.get("eval_reward"),
        "Mean reward of its samples": following.get("reward"),
        "Run": run["run_id"],
    }
    known = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    title = [f"# {run_dir.root.name}, iteration {iteration}", "", "Post-trained with Flagpost.", ""]
    return "\n".join(["---", *head, "---", "", *title, *known, ""])
