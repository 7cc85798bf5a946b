"""`run export`: a checkpoint as a directory for the Hugging Face Hub, or for anything that loads such."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator import outputs, shared_fs
from coordinator.outputs import Incomplete
from coordinator.run_dir import RunDir
from coordinator.settings import TINY, SettingsError
from coordinator.start import read_run_json
from rollout.engine_admin import PROBE
from rollout.weights import ADAPTER_CONFIG, is_adapter

CARD = "README.md"


def export(root: Path, iteration: int | None, target: Path) -> list[str]:
    """Copy the model of `iteration` (None: the newest) into `target`, with a model card; its files' names.

    Every copy is verified. `target` appears whole or not at all; SettingsError: not at all.
    """
    run_dir = RunDir(root)
    if run_dir.run_json.name not in outputs.names(root):
        raise SettingsError(f"--log-path {root}: no run is here")
    run = read_run_json(run_dir)
    there = outputs.checkpoints(run_dir)
    iteration = iteration or max(there, default=0)
    if iteration not in there:
        found = f"there are {', '.join(map(str, there))}" if there else "there is none yet"
        raise SettingsError(f"--iteration {iteration}: {root} has no such checkpoint; {found}")
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(Path.cwd())):
        raise SettingsError(f"-o {target}: is there already; give a new directory")
    source = run_dir.checkpoint(iteration)
    try:
        wanted = outputs.read_result(source).files
    except Incomplete as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise SettingsError(f"--iteration {iteration}: {reason}; export another one") from None
    files = sorted(name for name in wanted if "/" not in name and name not in {PROBE, CARD})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as made:
            inside = Path(made) / target.name
            inside.mkdir()
            _copy(source, inside, {name: wanted[name] for name in files})
            _name_base(inside, run)
            (inside / CARD).write_text(_card(run_dir, run, iteration))
            os.replace(inside, target)
    except OSError as error:
        raise SettingsError(f"-o {target}: {error.strerror or error}; give another directory") from None
    return [*files, CARD]


def _copy(source: Path, target: Path, files: Mapping[str, Any]) -> None:
    """Copy `files`, which have these facts; SettingsError for one that is missing or has others."""
    there = [name for name in files if name in outputs.names(source)]
    for name in there:
        shutil.copy(source / name, target / name)
    found = shared_fs.checksums(target)
    if damaged := [name for name, facts in files.items() if found.get(name) != facts]:
        raise SettingsError(
            f"{source / damaged[0]} is missing or damaged; nothing was exported, export another iteration"
        )


def _name_base(directory: Path, run: dict[str, Any]) -> None:
    """Let an adapter say which model it belongs to as the user said it, not where that lies on a node.

    The built-in model has no name that anything else could load: it stays where the run has it.
    """
    path, model = directory / ADAPTER_CONFIG, run["fixed"]["model"]["name"]
    if path.is_file() and not model.startswith(TINY):
        config = json.loads(path.read_bytes()) | {"base_model_name_or_path": model}
        path.write_text(json.dumps(config, indent=2) + "\n")


def _card(run_dir: RunDir, run: dict[str, Any], iteration: int) -> str:
    """README.md of the model, with the metadata that the Hub reads."""
    model, tasks = (run["fixed"][key]["name"] for key in ("model", "tasks"))
    is_local = model.startswith(("/", ".", "builtin:"))
    library = "peft" if is_adapter(run_dir.checkpoint(iteration)) else "transformers"
    head = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [reinforcement-learning]"]
    head += [f"base_model: {model}"] if not is_local else []
    lines = {line["iteration"]: line for line in outputs.metrics_lines(run_dir)}
    following = lines.get(iteration + 1, {})  # the next iteration is the first to use this policy
    facts = {
        "Started from": Path(model).name if is_local else model,
        "Tasks": Path(tasks).name,
        "Iterations of training": iteration,
        "Evaluation reward": following.get("eval_reward"),
        "Mean reward of its samples": following.get("reward"),
        "Run": run["run_id"],
    }
    known = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    title = [f"# {run_dir.root.name}, iteration {iteration}", "", "Post-trained with Flagpost.", ""]
    return "\n".join(["---", *head, "---", "", *title, *known, ""])
