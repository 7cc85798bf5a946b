"""What couples a crew that generates and one that trains: manifests and checkpoints that are published.

The rollout crew opens iteration r once the policy that samples it is there, that of max(0, r - 1 - K); the
train crew opens iteration t once its manifest is there. So at most K + 1 iterations wait to be trained.
"""

from coordinator.directory import published
from coordinator.node.node import Node
from coordinator.protocol.phases import Phase
from coordinator.protocol.snapshot import Board
from coordinator.rows import lineage, resume


def open_next(node: Node) -> int | None:
    """Return the first iteration that is not finished; None when there is none left to do."""
    last = node.settings.iterations
    number = resume.next_iteration(node.finished, node.settings)
    if node.run_dir.crew == "rollout":
        while (last is None or number <= last) and _is_generated(node, number):
            number += 1
    if last is not None and number > last:
        return None
    return lineage.next_to_run(node, number)


def open_when_ready(node: Node) -> int | None:
    """Return the same, once the other crew has published what the iteration needs."""
    other = node.other_crew
    if other is None:
        return open_next(node)
    lacking = ""

    def ready(_board: Board) -> tuple[int | None] | None:
        nonlocal lacking
        other.check()
        number = open_next(node)  # again each time: what was there may turn out to be damaged
        lacking = "" if number is None else lacks(node, number)
        return None if lacking else (number,)

    answer = node.watch.wait(ready, node.check, lambda: lacking)
    assert answer is not None  # without a time limit
    return answer[0]


def lacks(node: Node, number: int) -> str:
    """Return what has to be published before iteration `number` is opened; empty: nothing."""
    if node.run_dir.crew == "rollout":
        sampler = lineage.sampled_by(number, node.settings)
        is_there = sampler == 0 or sampler in published.checkpoints(node.run_dir)
        return "" if is_there else f"the checkpoint of iteration {sampler}, by the train crew"
    return "" if _is_generated(node, number) else f"the groups of iteration {number}, by the rollout crew"


def _is_generated(node: Node, number: int) -> bool:
    """Return whether the rollout crew has finished an iteration."""
    return resume.resume_at(node.run_dir, node.settings.of_crew("rollout"), number) > Phase.EVAL_ROLLOUT
