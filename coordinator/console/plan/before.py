"""`run plan --model`: what a run would need of GPUs that need not be here."""

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.directory.layout import RunDir
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start import estimate
from coordinator.start.dry_run import check_named
from coordinator.start.inputs import STATE_BYTES, base_model_dir
from coordinator.start.run_json import chosen_save_interval, with_save_interval
from rollout.engines.hub import fetch_shapes
from rollout.engines.model_dir import WeightsError, tensor_names
from rollout.engines.model_facts import count_active_parameters, count_parameters
from rollout.settings import TINY
from rollout.storage.files import is_directory
from trainer.memory import Shape

NAMES = ("tasks", "eval_tasks", "rollout.reward", "rollout.environment")
"""How settings begin that name something to look at."""


def show_needs(model: str, gpus: int, gpu: str, overrides: Mapping[str, Any]) -> None:
    """Print what the master would announce on `gpus` GPUs of this kind in all: memory, time and disk.

    `gpu`: a word of estimate.PEAKS. `overrides`: settings of the run, by dotted name. Raises SettingsError.
    """
    if gpu not in estimate.PEAKS:
        raise SettingsError(f"--gpu {gpu}: not known; give one of {', '.join(estimate.PEAKS)}")
    settings = build({**overrides, "model": model})
    if model == TINY:
        raise SettingsError(f"--model {TINY}: it fits everywhere; give a model's directory")
    if any(key.startswith(NAMES) for key in overrides):
        _look_at(settings, overrides)
    with tempfile.TemporaryDirectory(prefix="flagpost-plan-") as temporary:
        directory = base_model_dir(settings, RunDir(Path()), partial(fetch_shapes, Path(temporary)))
        try:
            shapes = {name: shape for name, (_, shape) in tensor_names(directory).items()}
            parameters, active = count_parameters(directory), count_active_parameters(directory)
        except WeightsError as error:
            raise SettingsError(f"--model {model}: {error}") from None
    nodes = settings.cluster.num_nodes
    memory_bytes = estimate.MEMORIES[gpu] * 2**20
    print("assumed  ", f"{gpus} x {gpu} with {memory_bytes / 1e9:.0f} GB (--gpus, --gpu)")
    print("memory   ", estimate.memory_text(shapes, settings.trainer, gpus, memory_bytes, nodes))
    print("time     ", estimate.time_text(parameters, settings, gpus, [gpu], active))
    if not settings.trainer.lora.rank:
        trained = parameters - Shape.from_tensors(shapes, 0, settings.trainer.freeze_vision).frozen
        state_bytes = STATE_BYTES * trained
        settings = with_save_interval(settings, {"save_interval": chosen_save_interval(state_bytes)})
        print("disk     ", estimate.disk_text(trained, state_bytes, settings, on_gpu=True))


def _look_at(settings: RunSettings, overrides: Mapping[str, Any]) -> None:
    """Check what the settings name; SettingsError as check_named. Directories may be on a cluster alone."""
    if settings.data_path is not None and not is_directory(Path(settings.data_path)):
        print(f"not looked at, as --data-path {settings.data_path} is not here: tasks, reward, environment",
              file=sys.stderr)  # fmt: skip
        return
    cluster = settings.cluster.model_copy(update={"local_dir": None})
    check_named(settings.model_copy(update={"cluster": cluster}), overrides)
