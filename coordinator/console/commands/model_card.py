"""The model card of an export: what the Hub reads, what the model was made from and how, how to load it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coordinator.console.views.scores import Score, scores
from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import measured
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.run_json import find_run, has_run
from coordinator.start.start import last_start
from rollout.engines.model_dir import is_adapter
from rollout.engines.model_facts import takes_pictures
from rollout.settings import TINY

CARD = "README.md"
WITHOUT_REWARDS = ("sft", "dpo", "distill")
"""Algorithms whose samples have no reward that says anything."""
STARTED_FROM = "- Started from: "


def model_card(run_dir: RunDir, run: dict[str, Any], iteration: int, directory: Path) -> str:
    """Return the README.md of the model in `directory`, an export of a checkpoint of the run at `run_dir`.
    `run` is its run.json.
    """
    settings, name = _settings(run_dir.root), run["fixed"]["model"]["name"]
    algorithm = settings.trainer.algorithm if settings else None
    base, started_from = origin_of(name)
    has_adapter = is_adapter(directory)
    library = "peft" if has_adapter else "transformers"
    sees = (directory / "config.json").is_file() and takes_pictures(directory)
    task = "image-text-to-text" if sees else "text-generation"
    adapters = settings.trainer.lora.rank if settings else 0
    tags = [] if algorithm in WITHOUT_REWARDS else ["reinforcement-learning"]
    tags += [algorithm] if algorithm not in (None, "default") else []
    tags += ["lora"] if adapters else []
    head = [f"library_name: {library}", f"pipeline_tag: {task}", f"tags: [{', '.join(tags)}]"]
    head += [f"base_model: {base}"] if base else []
    facts = {
        "Started from": started_from,
        "Tasks": Path(run["fixed"]["tasks"]["name"]).name,
        "Iterations of training": iteration,
        **(_training(settings) if settings else {}),
        **_measures(run_dir, settings, iteration),
        "Run": run["run_id"],
    }
    known = [f"- {title}: {value}" for title, value in facts.items() if value is not None]
    title = [f"# {run_dir.root.name}, iteration {iteration}", "", "Post-trained with Flagpost.", ""]
    return "\n".join(["---", *head, "---", "", *title, *known, "", *_loading(has_adapter, sees), ""])


def origin_of(model: str) -> tuple[str | None, str]:
    """Return what the Hub calls the model that --model `model` goes back to (None: it is not known), and what
    a run from it started from, for people: behind a checkpoint of another run, or its export, is that run's.
    """
    directory = Path(model)
    iteration, root = parse_iteration_name(directory.name), directory.parent.parent
    if iteration is not None and has_run(root):
        try:
            before = find_run(root)
        except SettingsError:  # of another format
            return None, f"{root.name}, iteration {iteration}"
        base, earlier = origin_of(before["fixed"]["model"]["name"])
        settings = _settings(root)
        algorithm = f"{settings.trainer.algorithm} of " if settings else "of "
        return base, f"{root.name}, iteration {iteration} ({algorithm}{earlier})"
    if (directory / CARD).is_file():
        return _origin_by_card(directory)
    base = hub_name(model)
    return base, base or ("the built-in model" if model.startswith(TINY) else directory.name)


def hub_name(model: str) -> str | None:
    """Return the name on the Hub of what --model was, if it is known: it was given, or a path in a cache of
    the Hub.
    """
    if model.startswith(("/", ".", "builtin:")):
        cached = re.search(r"/models--([^/]+)/snapshots/[^/]+/?$", model)
        return cached and cached[1].replace("--", "/", 1)
    return model


def _origin_by_card(directory: Path) -> tuple[str | None, str]:
    """Return the origin of a directory whose card may be one of ours."""
    text = (directory / CARD).read_text(errors="replace")
    started_from = next((line for line in text.splitlines() if line.startswith(STARTED_FROM)), None)
    base = hub_name(str(directory))
    if base is not None or started_from is None:
        return base, base or directory.name
    try:
        head = yaml.safe_load(text.split("---\n")[1])
    except (yaml.YAMLError, IndexError):
        head = None
    named = head.get("base_model") if isinstance(head, dict) else None  # pyright: ignore
    earlier = f"{directory.name} ({started_from.removeprefix(STARTED_FROM)})"
    return (named if isinstance(named, str) else None), earlier


def _settings(root: Path) -> RunSettings | None:
    """Return the settings of a run's last start, if they can be read."""
    try:
        last = last_start(root)
        return last and RunSettings.published(last.settings)
    except SettingsError:
        return None


def _training(settings: RunSettings) -> dict[str, Any]:
    """Return how a run trains, for people."""
    trainer, rollout, lora = settings.trainer, settings.rollout, settings.trainer.lora
    has_rewards = trainer.algorithm not in WITHOUT_REWARDS
    return {
        "Algorithm": trainer.algorithm,
        "Samples a step": trainer.global_batch_size,
        "Learning rate": f"{trainer.learning_rate:g}",
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}" if lora.rank else None,
        "Reward": rollout.scoring if has_rewards else None,
    }


def _measures(run_dir: RunDir, settings: RunSettings | None, iteration: int) -> dict[str, Any]:
    """Return what was measured of the policy of `iteration`; the newest evaluation, where that has none."""
    lines = [line for line in published.metrics_lines(run_dir) if measured(line) <= iteration]
    reward = next((line.get("reward") for line in reversed(lines) if measured(line) == iteration), None)
    has_rewards = settings is None or settings.trainer.algorithm not in WITHOUT_REWARDS
    facts = {"Mean reward of its samples": reward} if has_rewards else {}
    evaluated = next((line for line in reversed(lines) if scores(line)), None)
    if evaluated is None:
        return facts
    at = measured(evaluated)
    of_earlier = "" if at == iteration else f", of iteration {at}"
    texts = (f"{_score(score, settings)}{of_earlier}" for score in scores(evaluated))
    return {"Evaluation": "; ".join(texts), **facts}


def _score(score: Score, settings: RunSettings | None) -> str:
    """Return a score and the set that it is of."""
    if settings is None:
        return f"{score}"
    source = settings.eval_sets[score.name].tasks if score.name in settings.eval_sets else None
    source = source or settings.evaluation_tasks or settings.tasks
    name = Path(str(source)).name
    return f"{score} on {name if score.name == 'eval_reward' else score.name}"


def _loading(has_adapter: bool, sees: bool) -> Iterator[str]:
    """Yield how to load the model, a block of Python."""
    yield "```python"
    if has_adapter:
        yield "from peft import AutoPeftModelForCausalLM"
        yield 'model = AutoPeftModelForCausalLM.from_pretrained("DIR")'
    else:
        kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
        yield f"from transformers import {kind}"
        yield f'model = {kind}.from_pretrained("DIR")'
    yield "```"
