"""Groups made ahead, while a checkpoint becomes durable: nothing of them is published, none is lost."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.collector.order import Order
from coordinator.collector.process import CollectorProcess
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import collecting, head_start, training
from coordinator.phases.node_share import Share
from coordinator.protocol.phase import Phase
from rollout.storage import files
from tests.simulation.faults import ACTIONS, Fault
from tests.simulation.test_simulation import NODES, run, searching, undisturbed
from tests.simulation.trainers import Trainer
from trainer.documents import TrainRequest

ITERATIONS = 3
WINDOW = [Phase.TRAINING, Phase.CHECKPOINT, Phase.CHECKPOINT, Phase.ENGINE_RESTARTED, Phase.ITERATION_END]


def slowly(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is durable some seconds after each node has its copy."""
    write = Trainer._write

    def wait_and_write(trainer: Trainer, request: TrainRequest, model: Mapping[str, bytes]) -> None:
        if request.ahead:
            trainer._wait(trainer._scheduler.random.uniform(3.0, 12.0))
        write(trainer, request, model)

    patch.setattr(Trainer, "_write", wait_and_write)


def watched(kept: Counter[int], finished: Counter[int]) -> Callable[[pytest.MonkeyPatch], None]:
    """Count the slots that each iteration's plan leaves with the nodes that have begun them ahead, and those
    that were finished by then.
    """

    def patch(patched: pytest.MonkeyPatch) -> None:
        slowly(patched)
        real, begin = collecting.collect_share, CollectorProcess._begin

        def collect(node: Node, iteration: Iteration, share: Share) -> Any:
            if share.kind == "train":
                kept[iteration.number] += len(share.in_flight(node.rank))
            return real(node, iteration, share)

        async def begun(collector: CollectorProcess, order: Order) -> Any:
            result = await begin(collector, order)
            assert collector._making is not None
            finished[order.iteration] += len(collector._making.collector._finished.to_hand_over)
            return result

        patched.setattr("coordinator.phases.rollout.collect_share", collect)
        patched.setattr(CollectorProcess, "_begin", begun)

    return patch


@pytest.mark.parametrize("claims", [True, False])
def test_groups_are_made_ahead_and_taken_over_by_their_row(claims: bool) -> None:
    kept, finished = Counter[int](), Counter[int]()
    policy = run(NODES, 2, (), watched(kept, finished), iterations=ITERATIONS, rollout__claims=claims)
    assert policy == undisturbed(ITERATIONS)
    assert set(kept) == {1, 2, 3} and kept[1] == 0 and min(kept[2], kept[3]) > 0
    assert set(finished) == {2, 3} and min(finished.values()) > 0, (
        "not one of them ahead of the last iteration"
    )


def test_without_a_head_start_nothing_is_made_ahead() -> None:
    kept, finished = Counter[int](), Counter[int]()
    options = {"iterations": ITERATIONS, "checkpoints__head_start": False}
    assert run(NODES, 2, (), watched(kept, finished), **options) == undisturbed(ITERATIONS)
    assert not finished and not any(kept.values())


def test_copy_of_other_bits_costs_time_alone() -> None:
    """As an engine would generate with that has got what is no copy of the checkpoint."""
    differs = Counter[tuple[bool, bool]]()

    def patch(patched: pytest.MonkeyPatch) -> None:
        slowly(patched)
        copy, restart = Trainer._copy, training.restart_engine

        def other_copy(trainer: Trainer, number: int, request: TrainRequest, files: dict[str, bytes]) -> None:
            name = "model.safetensors"
            other = {**files, name: files[name] + b" but for a bit"} if trainer._launch.node_rank else files
            copy(trainer, number, request, other)

        def watched_restart(node: Node, iteration: Iteration) -> Any:
            said = restart(node, iteration)
            differs[bool(said), node.rank > 0] += 1
            return said

        patched.setattr(Trainer, "_copy", other_copy)
        patched.setattr(training, "restart_engine", watched_restart)

    assert run(NODES, 1, (), patch, iterations=ITERATIONS) == undisturbed(ITERATIONS)
    assert not differs[True, True] and differs[True, False]


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(
    seed=st.integers(0, 1000),
    happens=st.lists(
        st.builds(
            Fault,
            action=st.sampled_from(ACTIONS),
            rank=st.integers(0, NODES - 1),
            iteration=st.integers(1, ITERATIONS),
            phase=st.sampled_from(WINDOW).map(int),
            calls=st.integers(0, 25),
            seconds=st.sampled_from([0.5, 3.0, 25.0, 40.0, 100.0]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_head_starts_come_through_all_faults(seed: int, happens: list[Fault]) -> None:
    assert run(NODES, seed, happens, slowly, iterations=ITERATIONS) == undisturbed(ITERATIONS)


# ---- the search finds what it is there for


def row_11_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head_start, "run", lambda _node, _iteration: None)


def the_next_iteration_opens_at_once(patch: pytest.MonkeyPatch) -> None:
    """It is opened by who begins ahead."""
    real = collecting.begin_share

    def begin(node: Node, iteration: Iteration, *more: Any) -> None:
        if node.is_master:
            directory = node.run_dir.trajectories("train", iteration.number)
            directory.mkdir(parents=True, exist_ok=True)
            files.publish(node.run_dir.iteration_json(iteration.number), b"{}")
        real(node, iteration, *more)

    patch.setattr(collecting, "begin_share", begin)


@pytest.mark.parametrize("broken", [row_11_waits_for_nobody, the_next_iteration_opens_at_once])
def test_a_broken_rule_of_the_head_start_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    def patch(patched: pytest.MonkeyPatch) -> None:
        slowly(patched)
        broken(patched)

    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        run(NODES, 0, (), patch, iterations=ITERATIONS)
