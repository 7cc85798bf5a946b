"""Choose which trajectories and batches are kept, once they have been trained on (trajectories.keep_last)."""

import contextlib
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import REMOVED, RunDir
from coordinator.keeping.trainer_states import newest_state
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.phase import Phase, phases_of
from rollout.storage import files


def retire_iterations(node: Node, iteration: Iteration) -> list[Path]:
    """Rename the trajectories and batches that the settings do not keep, so that none is ever seen half
    removed; `iteration` was just trained. Returns what is to be removed.

    What was never trained on stays: it is what a rollout alone is run for. So does all from `first_needed`
    on. The next iteration draws its tasks from what the newest one has left, and that always stays.
    """
    run_dir, settings = node.run_dir, node.settings.trajectories
    if settings.keep_last is None or Phase.TRAINING not in phases_of(node.settings.kind):
        return []
    end = min(iteration.number - settings.keep_last + 1, first_needed(node))
    # Only what was trained has a batch. It goes last, so that a removal that was cut off is seen here.
    names = published.names(run_dir.batch(0).parent)
    old = [number for name in names if (number := parse_iteration_name(name)) is not None and number < end]
    for number in old:
        if not settings.keep_every or number % settings.keep_every:
            for directory in _directories(run_dir, number):
                _rename(directory)
            names.append(_removed(run_dir.batch(number)).name)
    removed = [name.removeprefix(REMOVED) for name in names if name.startswith(REMOVED)]
    numbers = [number for name in removed if (number := parse_iteration_name(name)) is not None]
    return [_removed(directory) for number in numbers for directory in _directories(run_dir, number)]


def first_needed(node: Node) -> int:
    """Return the first iteration of which a later training may need the batch, or the trajectories.

    Training may fall back to any of the newest `checkpoints.keep_last` checkpoints, and to the newest one
    that is verified. A job that begins there repeats what was trained since the trainer state before. A batch
    that turns out to be damaged is made anew, of the trajectories of its replay window.
    """
    run_dir, settings = node.run_dir, node.settings
    checkpoints = [0, *published.checkpoints(run_dir)]
    verified = next(
        number for number in reversed(checkpoints) if not number or node.policies.is_verified(number)
    )
    oldest = min(checkpoints[-settings.checkpoints.keep_last :][0], verified)
    return newest_state(run_dir, oldest) + 1 - (settings.trainer.replay_window - 1)


def _directories(run_dir: RunDir, iteration: int) -> tuple[Path, ...]:
    kinds = (run_dir.trajectories("train", iteration), run_dir.trajectories("eval", iteration))
    return (*kinds, run_dir.batch(iteration))


def _removed(directory: Path) -> Path:
    return directory.with_name(f"{REMOVED}{directory.name}")


def _rename(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the removal before was cut off
        files.rename(directory, _removed(directory), durable=False)
