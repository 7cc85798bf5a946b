"""Choose the checkpoints that are kept, and have the others removed.

On the choice hang `old_trajectories.first_needed` (the batches that a fallback may need again), the disk that
`start.estimate.disk_text` and console/doctor/checks.py announce, and what docs/protocol.md promises under
"Two crews": the rollout crew finds the K + 1 newest.
"""

import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.file_names import parse_staging_name
from coordinator.directory.layout import REMOVED
from coordinator.directory.published import Incomplete
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.phase import Phase, phases_of
from coordinator.settings.keeping import CheckpointSettings
from rollout.storage import files
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)

UNVERIFIED = 2
"""So many checkpoints more than the settings keep may wait for one to be verified."""


def checkpoints_to_keep(
    checkpoints: Sequence[int],
    score: Callable[[int], float | None],
    settings: CheckpointSettings,
    at_least: int = 1,
) -> set[int]:
    """Return the iterations of `checkpoints` (in order) that stay: `at_least` the newest ones, and what the
    settings keep. `score` says how good a checkpoint is.
    """
    last = checkpoints[-max(settings.keep_last, at_least) :]
    every = [n for n in checkpoints if settings.keep_every and n % settings.keep_every == 0]
    if not settings.keep_best:
        return {*last, *every}
    scores = {n: value for n in checkpoints if (value := score(n)) is not None}
    best = sorted(scores, key=lambda n: (scores[n], n))
    return {*last, *every, *best[-settings.keep_best :]}


def retire_checkpoints(node: Node, iteration: Iteration) -> list[Path]:
    """Rename the checkpoints that the settings do not keep, so that none is ever seen half removed.

    Returns what is to be removed: these, what could not be removed before (another client held a file open),
    and what trainings have left that did not come to an end.
    """
    run_dir = node.run_dir
    checkpoints = _whole(node)
    sampling = node.settings.cluster.max_async_level + 1  # the next iterations are sampled by these
    stay = checkpoints_to_keep(checkpoints, node.finished.look().score, node.settings.checkpoints, sampling)
    verified = _newest_verified(node, checkpoints, set(checkpoints) - stay)
    for number in sorted(set(checkpoints) - stay):
        if number < verified:
            files.rename(run_dir.checkpoint(number), run_dir.removed(number, node.record.epoch))
            node.policies.forget(number)
    names = published.names(run_dir.checkpoints)
    return [
        run_dir.checkpoints / name
        for name in [*(name for name in names if _is_left(name, iteration)), *old_copies(names)]
    ]


def _whole(node: Node) -> list[int]:
    """Return the published checkpoints, in order, less those that were found damaged: these are set aside."""
    numbers = published.checkpoints(node.run_dir)
    for number in reversed(numbers):
        if node.policies.is_verified(number):
            break
        if (text := published.damage(node.run_dir.checkpoint(number))) is not None:
            node.policies.set_aside(number, Incomplete(text))
    return published.checkpoints(node.run_dir)


def _newest_verified(node: Node, checkpoints: Sequence[int], spare: Collection[int]) -> int:
    """Return the newest verified checkpoint: none goes that is newer, or there might be none to fall back to.

    If the background does not keep up, so that the disk would fill, the master verifies one here.
    """
    newest = next((number for number in reversed(checkpoints) if node.policies.is_verified(number)), 0)
    if sum(number >= newest for number in spare) > UNVERIFIED:
        newest = checkpoints[-1]
        try:
            node.policies.verify_now(newest, node.reading())
        except Incomplete as error:
            node.policies.set_aside(newest, error)
            return 0
    return newest


def verify_last(node: Node, iteration: Iteration) -> None:
    """Verify the checkpoint of the run's last iteration, since no later one reads it back.

    A damaged one is set aside, and Incomplete is raised: the iteration is not over, and is trained again.
    """
    is_last = iteration.number == node.settings.iterations
    trains = Phase.TRAINING in phases_of(node.settings.kind)
    if is_last and trains and not node.policies.is_verified(iteration.number):
        try:
            node.policies.verify_now(iteration.number, node.reading())
        except Incomplete as error:
            node.policies.set_aside(iteration.number, error)
            raise


def read_back(directory: Path) -> None:
    """Verify a published checkpoint, and write what comes of it into the checkpoint, for the master."""
    try:
        published.verify_and_record(directory, threads=1)  # the rollout wants the other cores
    except Incomplete as error:
        if directory.name in published.names(directory.parent):
            log.error("%s: the master will set the checkpoint aside", error)
    except (SharedFsError, FileNotFoundError) as error:  # the master assigns it anew
        log.warning("%s is not verified yet: %s", directory, error)


def old_copies(names: Collection[str]) -> list[str]:
    """Return the names of what was set aside, all but the newest of each kind."""
    old: list[str] = []
    for kind in (r"iteration_\d+\.damaged", r"\.iteration_\d+\.e\d+\.damaged", r"\.iteration_.*\.foreign"):
        copies = [name for name in names if re.fullmatch(kind, name)]
        old += sorted(copies, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])[:-1]
    return old


def _is_left(name: str, iteration: Iteration) -> bool:
    staged = parse_staging_name(name)
    return name.startswith(REMOVED) or (staged is not None and staged[0] <= iteration.number)
