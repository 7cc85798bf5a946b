"""Trainer states saved in the background (trainer.save_interval): where a job goes on, what is kept."""

import json
import logging
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.file_names import parse_state_name
from coordinator.directory.layout import REMOVED, RunDir
from coordinator.directory.published import Policy
from coordinator.keeping.resume import trained_iterations
from coordinator.node.node import Node
from rollout.storage import files
from trainer.documents import DamagedDocument, Resume, SavedState, TrainedBatch, TrainResult
from trainer.resume import plan_resume

log = logging.getLogger(__name__)

BATCH = "batch.safetensors"
DOCUMENT = "state.json"
"""Written last into a state."""
KEEP = 2
"""How many complete states are kept: the checkpoint of the newest one may be lost."""


def saved_in_background(run_dir: RunDir) -> dict[Path, SavedState]:
    """Return the states in trainer_states/ that were written to the end, by directory."""
    names = [name for name in published.names(run_dir.trainer_states) if parse_state_name(name)]
    return _complete(run_dir.trainer_states / name for name in names)


def _complete(directories: Iterable[Path]) -> dict[Path, SavedState]:
    states: dict[Path, SavedState] = {}
    for directory in directories:
        if document := published.read_json(directory / DOCUMENT):
            try:
                states[directory] = SavedState.from_json(json.dumps(document).encode())
            except DamagedDocument as error:
                log.warning("%s is not used: %s", directory, error)
    return states


def newest_state(run_dir: RunDir, iteration: int) -> int:
    """Return the iteration of the trainer state with which a job gets to the checkpoint of `iteration`; 0: it
    begins without one.
    """
    states = [state.iteration for state in saved_in_background(run_dir).values()]
    for number in [n for n in reversed(published.checkpoints(run_dir)) if n <= iteration]:
        if published.STATE_DIR in published.names(run_dir.checkpoint(number)):
            states.append(number)
            break
    return max((number for number in states if number <= iteration), default=0)


def resume_from(run_dir: RunDir, base: Policy) -> Resume:
    """Return where a job that loads `base` finds its optimizer's state; paths begin in the run directory."""
    if base.iteration == 0 or published.STATE_DIR in published.names(base.directory):
        return Resume()
    older = [run_dir.checkpoint(n) for n in published.checkpoints(run_dir) if n < base.iteration]
    by_directory = {**saved_in_background(run_dir), **_complete(path / published.STATE_DIR for path in older)}
    states = {str(directory.relative_to(run_dir.root)): state for directory, state in by_directory.items()}
    trained = {*trained_iterations(run_dir, base.iteration), base.iteration}
    resume = plan_resume(base.iteration, base.digest, states, trained, partial(_trained, run_dir))
    if resume == Resume():
        log.warning("no trainer state leads to iteration %d: its optimizer starts afresh", base.iteration)
    return resume


def trained(run_dir: RunDir, result: TrainResult) -> TrainedBatch:
    """Return the TrainedBatch by which a training that left no state can be repeated."""
    return TrainedBatch(
        iteration=result.iteration,
        policy=result.policy,
        batch_file=str((run_dir.batch(result.iteration) / BATCH).relative_to(run_dir.root)),
        batch_sha256=result.batch_sha256,
        settings=result.settings,
        max_tokens=result.max_tokens,
        iterations=result.iterations,
    )


def _trained(run_dir: RunDir, iteration: int) -> TrainedBatch | None:
    """Return how an iteration was trained, if that can be repeated."""
    directory = run_dir.batch(iteration)
    batch_json, trained_json = (
        published.read_json(directory / "batch.json"),
        published.read_json(run_dir.trained(iteration)),
    )
    if batch_json is None or trained_json is None or BATCH not in published.names(directory):
        return None
    try:
        batch = TrainedBatch.from_json(json.dumps(trained_json).encode())
    except DamagedDocument as error:
        log.warning("%s is not used: %s", run_dir.trained(iteration), error)
        return None
    return batch if batch.batch_sha256 == batch_json["sha256"] else None


def with_local_paths(run_dir: RunDir, base: Policy, resume: Resume) -> Resume:
    """Return `resume` with the absolute paths of this node, and with the state inside of `base` if it names
    none.
    """
    directory = run_dir.root / resume.state_dir if resume.state_dir else None
    if resume == Resume() and base.iteration > 0 and published.STATE_DIR in published.names(base.directory):
        directory = base.directory / published.STATE_DIR
    state_dir = str(directory.absolute()) if directory else None
    repeat = [
        batch.model_copy(update={"batch_file": str((run_dir.root / batch.batch_file).absolute())})
        for batch in resume.repeat
    ]
    return resume.model_copy(update={"state_dir": state_dir, "repeat": tuple(repeat)})


def retire_states(run_dir: RunDir) -> list[Path]:
    """Keep the newest states, and what is being written; rename the others. Returns what is to be removed."""
    complete = sorted({state.iteration for state in saved_in_background(run_dir).values()})
    oldest, newest = (complete[-KEEP:][0], complete[-1]) if complete else (0, 0)
    nameless: list[Path] = []
    for name in published.names(run_dir.trainer_states):
        path, entry = run_dir.trainer_states / name, parse_state_name(name)
        if entry and (entry[0] < oldest or (entry[0] < newest and entry[0] not in complete)):
            path = path.with_name(f"{REMOVED}{name}")
            files.rename(run_dir.trainer_states / name, path)
        if path.name.startswith(REMOVED):
            nameless.append(path)
    return nameless


def wait_for_newest(node: Node) -> None:
    """Wait until the job has saved its state: the run is over, and a longer run goes on from that state."""
    saving = node.run_dir.trainer_state(node.position.iteration, node.record.epoch)
    give_up_at = time.monotonic() + node.settings.trainer.collective_timeout_s
    while saving.name in published.names(node.run_dir.trainer_states) and DOCUMENT not in published.names(
        saving
    ):
        node.check()
        if not node.trainer.is_alive() or time.monotonic() > give_up_at:
            log.warning("%s was not saved to its end: extending the run repeats some training", saving)
            return
        time.sleep(node.settings.cluster.poll_max_s)
