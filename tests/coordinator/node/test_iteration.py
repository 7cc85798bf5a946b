"""Which phases an iteration has left, in each kind of run."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.directory.layout import RunDir
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build

KINDS = {
    "both": {},
    "rollout": {"rl_phase": "rollout"},
    "update": {"rl_phase": "update"},
    "eval": {"rl_phase": "rollout", "rollout_split": "eval-only", "eval_tasks": "tasks.jsonl"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_run_decides_which_rows_there_are(kind: str) -> None:
    settings = build(KINDS[kind])
    assert settings.kind == kind
    assert [phase for phase in Phase if Iteration(1).has(phase, settings)] == [
        phase for phase in Phase if kind in phase.kinds
    ]


def test_rows_that_are_done_are_left_out_but_the_opening_is_not() -> None:
    iteration = Iteration(1, resume_at=Phase.TRAIN_DATA)
    left = [phase for phase in Phase if iteration.has(phase, build({}))]
    assert left == [Phase.ITERATION_START, *list(Phase)[Phase.TRAIN_DATA :]]


def test_iteration_that_is_begun_again_counts_from_its_first_beginning_with_what_was_finished(
    tmp_path: Path,
) -> None:
    node = cast(
        Node,
        SimpleNamespace(
            is_master=True,
            rank=0,
            run_dir=RunDir(tmp_path),
            identity=SimpleNamespace(host="node-a"),
            _begun=None,
            gathering=SimpleNamespace(settle=lambda: None, returned=lambda: False),
        ),
    )

    def begin(number: int) -> Iteration:
        begun = Node.next_iteration(node, number - 1, lambda _node: number)
        assert begun is not None and begun.number == number
        return begun

    first = begin(7)
    first.documents[Phase.ITERATION_START] = {"resume_at": Phase.TRAINING}
    first.phase_s["train_rollout"] = first.work_s["train_rollout"] = 10.0
    first.ended_in["train_rollout"] = 2
    again = begin(7)
    assert first is not again and first.begun_s == again.begun_s and not again.documents
    assert (again.phase_s, again.ended_in) == ({"train_rollout": 10.0}, {"train_rollout": 2})
    again.phase_s["training"] = 1.0
    assert "training" not in first.phase_s
    assert begin(8).begun_s > first.begun_s and not begin(8).phase_s
