"""Couple a crew that generates and one that trains, by manifests and checkpoints that are published.

The rollout crew opens iteration r once the policy that samples it is there, that of max(0, r - 1 - K); the
train crew opens iteration t once its manifest is there. So at most K + 1 iterations wait to be trained.
"""

import contextlib
import logging
import time

from coordinator.keeping import policy_choice, resume
from coordinator.node.node import Node
from coordinator.phases.metrics import is_scored, summary
from coordinator.protocol.exits import EpochChanged
from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import Board

log = logging.getLogger(__name__)


def open_next(node: Node) -> int | None:
    """Return the first iteration that is not finished; None when there is none left to do."""
    last = node.settings.iterations
    number = resume.next_iteration(node.finished, node.settings)
    if node.run_dir.crew == "rollout":
        while (last is None or number <= last) and _is_generated(node, number):
            number += 1
    if last is not None and number > last:
        return None
    return policy_choice.next_to_run(node, number)


def is_finished(node: Node) -> bool:
    """Return whether nothing is left to do for any crew."""
    if node.run_dir.crew != "rollout":
        return open_next(node) is None
    last = node.settings.iterations
    return last is not None and node.finished.look().last(*resume.TRAINS) >= last


def open_when_ready(node: Node) -> int | None:
    """Return the iteration of `open_next`, once the other crew, if any, has published what it needs."""
    other = node.other_crew
    if other is None:
        return open_next(node)
    since_s = time.monotonic()

    def ready(_board: Board) -> tuple[int | None] | None:
        other.check()
        _say_news(node)
        if (record := other.other_settings()) is not None:
            node.follow(record)
        if node.gathering.returned():
            raise EpochChanged
        _list_anew(node)
        number = open_next(node)  # again each time: what was there may turn out to be damaged
        node.position.lack(lacks(node, number))
        return None if node.position.lacking else (number,)

    answer = node.watch.wait(ready, node.check, lambda: f"{node.position.lacking}, by {other.describe()}")
    assert answer is not None  # without a time limit
    node.idle_s = time.monotonic() - since_s
    return answer[0]


def _list_anew(node: Node) -> None:
    """List where the other crew publishes: a client that believes old listings shows what it hid (see
    protocol.fresh_listing).
    """
    run_dir = node.run_dir
    directories = [run_dir.checkpoints]
    if run_dir.crew != "rollout":
        awaited = resume.next_iteration(node.finished, node.settings)
        rollouts = [run_dir.trajectories(kind, awaited) for kind in ("train", "eval")]
        directories = [place for rollout in rollouts for place in (rollout.parent, rollout)]
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            node.watch.listings.names(directory)


def _say_news(node: Node) -> None:
    """Say at the master's terminal what iterations have come to, where the train crew is another one."""
    if node.run_dir.crew != "rollout" or not node.identity.leads_run:
        return
    line = node.finished.look().newest or {"iteration": 0}
    if node.announced is not None and line["iteration"] > node.announced:
        log.info("%s", summary(line, node.settings.iterations, is_scored(node.settings)))
    node.announced = line["iteration"]


def lacks(node: Node, number: int | None) -> str:
    """Return in words what has to be published before iteration `number` is opened, or, where that is None,
    before the crew ends: a manifest may have to be made again. Empty: nothing.
    """
    if number is None:
        return "" if is_finished(node) else f"the training of iteration {node.settings.iterations}"
    if node.run_dir.crew == "rollout":
        if policy_choice.awaited_sampler(node, number) is not None:
            return ""
        return f"the checkpoint of iteration {policy_choice.sampled_by(number, node.settings)}"
    return "" if _is_generated(node, number) else f"the groups of iteration {number}"


def _is_generated(node: Node, number: int) -> bool:
    """Return whether the rollout crew has finished an iteration."""
    return resume.resume_at(node.run_dir, node.settings.of_crew("rollout"), number) > Phase.EVAL_ROLLOUT
