"""Before the start: does the model have a value for each of its tensors?"""

import hashlib
import json
import logging
import subprocess
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER
from coordinator.machine.children import as_fork
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import engine_of
from rollout.engines.model_dir import read_json, tensor_names
from rollout.storage import known_files

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0


def refuse_incomplete(settings: RunSettings, model_dir: Path) -> None:
    """Raise SettingsError if tensors of the model are not in its files, or have other shapes there:
    transformers would fill them at random. Also if it knows no such model, or this one cannot have the
    adapters of the settings. Warn of tensors in the files that are none of the model's.

    A process finds out, as this takes torch; what it says of a model that can be trained is remembered on
    this machine.
    """
    engine = engine_of(settings, MASTER)
    python = engine.python
    if settings.rl_phase == "rollout" and not engine.uses_transformers:
        return  # nothing of it is loaded by transformers
    lora = settings.trainer.lora
    adapters = [lora.model_dump_json()] if lora.rank and settings.rl_phase != "rollout" else []
    described = json.dumps(
        [read_json(model_dir / "config.json"), tensor_names(model_dir), *adapters], sort_keys=True
    )
    digest = hashlib.sha256(described.encode()).hexdigest()
    mark = [python, f"transformers {version('transformers')}: {digest}"]
    ask = partial(_answer, settings.model, python, model_dir, *adapters)
    answer: dict[str, Any] = known_files.remembered(mark, ask) or {}
    if unknown := answer.get("unknown"):
        log.warning(
            "--model %s: its files hold %d tensors that transformers leaves out of the model, as those of "
            "other parts of it, e.g. %r; no checkpoint will have them",
            settings.model,
            len(unknown),
            unknown[0],
        )


def _answer(model: str, python: str, model_dir: Path, *adapters: str) -> dict[str, Any] | None:
    """Return the answer of trainer.model.check on a `model` that can be trained; None if it cannot tell,
    which the trainer will explain. SettingsError for one that cannot, which is asked anew at the next start:
    another version of this program may know better, and peft may be installed.
    """
    argv = [python, "-P", "-m", "trainer.model.check", str(model_dir), *adapters]
    try:
        with tempfile.TemporaryDirectory() as groups:
            command = as_fork(argv, groups)
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        log.debug("cannot tell whether %s has all tensors: %s", model_dir, error)
        return None
    if "refusal" in answer:
        raise SettingsError(f"--model {model}: {answer['refusal'].removeprefix(f'{model_dir}: ')}")
    if "adapters" in answer:
        raise SettingsError(f"{answer['adapters']:.300}")
    return answer
