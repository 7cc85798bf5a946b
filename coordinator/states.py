"""Trainer states that were saved in the background (trainer.save_interval): which one a job goes on from, and
which are kept.
"""

import json
import logging
import time
from typing import Any

from coordinator import outputs, shared_fs
from coordinator.node import Node
from coordinator.outputs import Policy
from coordinator.run_dir import RunDir, parse_state_name
from trainer.request import DamagedDocument, Resume, SavedState, TrainedBatch
from trainer.resume import plan_resume

log = logging.getLogger(__name__)

DOCUMENT = "state.json"
"""Written last into a state."""
KEEP = 2
"""Complete states that are kept: the checkpoint of the newest one may be lost."""


def complete_states(run_dir: RunDir) -> dict[str, SavedState]:
    """The states that were written to the end, by the names of their directories."""
    found: dict[str, SavedState] = {}
    for name in outputs.names(run_dir.trainer_states):
        if parse_state_name(name) and (
            document := outputs.read_json(run_dir.trainer_states / name / DOCUMENT)
        ):
            try:
                found[name] = SavedState.from_json(json.dumps(document).encode())
            except DamagedDocument as error:
                log.warning("%s is not used: %s", run_dir.trainer_states / name, error)
    return found


def resume_from(run_dir: RunDir, base: Policy, save_interval: int) -> Resume:
    """Where a job that has to load `base` finds its optimizer's state; paths begin in the run directory."""
    if base.iteration == 0 or "trainer_state" in outputs.names(base.directory):
        return Resume()
    trained = outputs.trained_iterations(run_dir, base.iteration + 1)
    published = {n: outputs.policy_of(run_dir, n).digest for n in outputs.checkpoints(run_dir)}
    batches = {n: _batch(run_dir, n) for n in {*trained, base.iteration}}
    found = complete_states(run_dir)
    return plan_resume(base.iteration, base.digest, found, batches, published, save_interval)


def located(run_dir: RunDir, resume: Resume) -> Resume:
    """The same with the paths of this node."""
    state_dir = str((run_dir.trainer_states / resume.state_dir).absolute()) if resume.state_dir else None
    repeat = [
        batch.model_copy(update={"batch_file": str((run_dir.root / batch.batch_file).absolute())})
        for batch in resume.repeat
    ]
    return resume.model_copy(update={"state_dir": state_dir, "repeat": tuple(repeat)})


def _batch(run_dir: RunDir, iteration: int) -> TrainedBatch | None:
    directory = run_dir.batch(iteration)
    about: dict[str, Any] | None = outputs.read_json(directory / "batch.json")
    file = directory / "batch.safetensors"
    if about is None or file.name not in outputs.names(directory):
        return None
    return TrainedBatch(
        iteration=iteration, batch_file=str(file.relative_to(run_dir.root)), batch_sha256=about["sha256"]
    )


def remove_old_states(run_dir: RunDir) -> None:
    """Keep the newest ones, and what is being written."""
    names = {
        name: entry for name in outputs.names(run_dir.trainer_states) if (entry := parse_state_name(name))
    }
    complete = sorted(names[name][0] for name in complete_states(run_dir) if name in names)
    oldest = complete[-KEEP:][0] if complete else 0
    newest = complete[-1] if complete else 0
    for name, (iteration, _epoch) in names.items():
        unfinished = iteration not in complete and iteration < newest
        if iteration < oldest or unfinished:
            shared_fs.remove_tree(run_dir.trainer_states / name)


def wait_for_newest(node: Node) -> None:
    """Let the job end what it saves: the run is over, and what it takes to extend it should be there."""
    saving = node.run_dir.trainer_state(node.iteration, node.record.epoch)
    give_up_at = time.monotonic() + node.settings.trainer.collective_timeout_s
    while saving.name in outputs.names(node.run_dir.trainer_states) and DOCUMENT not in outputs.names(saving):
        node.check()
        if not node.trainer.is_alive() or time.monotonic() > give_up_at:
            log.warning("%s was not saved to its end: extending the run repeats some training", saving)
            return
        time.sleep(node.settings.cluster.poll_max_s)
