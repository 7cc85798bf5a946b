"""Random faults against a crew that generates and one that trains: they come to what one crew comes to."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Policy
from coordinator.keeping import old_checkpoints, policy_choice
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import batch
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase
from tests.simulation.faults import ACTIONS, Fault, faults
from tests.simulation.test_simulation import NODES, SEGMENTS, run, searching, undisturbed
from tests.simulation.world import World

ITERATIONS = 4
IN_CREWS = st.sampled_from([1, 2])
"""How many of the three nodes train."""


@pytest.mark.parametrize("level", [0, 1, 3])
def test_two_crews_come_to_what_one_comes_to(level: int) -> None:
    options: dict[str, Any] = {"iterations": ITERATIONS, "cluster__max_async_level": level}
    assert run(NODES, 3, (), trainers=1, **options) == undisturbed(ITERATIONS, level)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(
    seed=st.integers(0, 1000),
    happens=st.lists(faults(NODES, ACTIONS), min_size=1, max_size=5),
    level=st.sampled_from([0, 1, 3]),
    trainers=IN_CREWS,
)
def test_two_crews_come_through_all_faults(
    seed: int, happens: list[Fault], level: int, trainers: int
) -> None:
    options: dict[str, Any] = {"iterations": ITERATIONS, "cluster__max_async_level": level}
    assert run(NODES, seed, happens, trainers=trainers, **options) == undisturbed(ITERATIONS, level)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(
    seed=st.integers(0, 1000),
    happens=st.lists(faults(NODES, ACTIONS), min_size=1, max_size=5),
    level=st.sampled_from([0, 1]),
    trainers=IN_CREWS,
)
def test_two_crews_come_through_all_faults_in_segments(
    seed: int, happens: list[Fault], level: int, trainers: int
) -> None:
    options: dict[str, Any] = {"iterations": ITERATIONS, "cluster__max_async_level": level, **SEGMENTS}
    expected = undisturbed(ITERATIONS, level, in_segments=True)
    assert run(NODES, seed, happens, trainers=trainers, **options) == expected


@pytest.mark.parametrize("row", range(8))
def test_node_of_either_crew_may_die_in_any_row(row: int) -> None:
    """One after the other, at the first call of every other row, and in its course in those between; the
    second machine of the crew that generates the other way round. That crew has the rows to 6, then it
    waits; the one that trains has those from 7.
    """
    rows = (row, row, min(row + 7, Phase.ITERATION_END))
    seconds = 2.0 if row // 2 % 2 else 40.0
    happens = [
        Fault("kill", machine, 2 + machine, phase, 1 if (phase + machine) % 2 else 6, seconds)
        for machine, phase in enumerate(rows)
    ]
    policy = run(NODES, row, happens, trainers=1, iterations=ITERATIONS, cluster__max_async_level=1)
    assert policy == undisturbed(ITERATIONS, 1)


# ---- the search finds what it is there for


def the_newest_policy_samples(patch: pytest.MonkeyPatch) -> None:
    real = policy_choice.base_of

    def newest(node: Node, iteration: Iteration) -> Policy:
        if node.run_dir.crew != "rollout":
            return real(node, iteration)
        return node.policies.policy_of(published.latest_before(node.run_dir, iteration.number))

    patch.setattr(policy_choice, "base_of", newest)


def a_checkpoint_too_many_goes(patch: pytest.MonkeyPatch) -> None:
    real = old_checkpoints.checkpoints_to_keep
    patch.setattr(
        old_checkpoints,
        "checkpoints_to_keep",
        lambda there, score, to_keep, least: real(there, score, to_keep, least - 1),
    )


def crews_share_their_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunDir, "master", property(lambda run_dir: run_dir.root / "protocol" / "main" / "master"))
    patch.setattr(RunDir, "workers", property(lambda run_dir: run_dir.root / "protocol" / "main" / "workers"))


@pytest.mark.parametrize(
    "broken", [the_newest_policy_samples, a_checkpoint_too_many_goes, crews_share_their_epochs]
)
def test_a_broken_rule_of_crews_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        for seed in range(4):
            run(NODES, seed, (), broken, trainers=1, iterations=6, cluster__max_async_level=3)


@pytest.fixture
def world() -> Any:
    root = Path(tempfile.mkdtemp())
    yield World(root, NODES, 1, {"iterations": ITERATIONS, "cluster.max_async_level": 1}, trainers=1)
    shutil.rmtree(root)


def codes(world: World) -> dict[int, int | None]:
    """The exit code of the last process of each machine."""
    return {process.machine: process.code for process in world.processes}


def test_crew_that_fails_ends_the_other_with_its_words(world: World) -> None:
    world.allowed = {Exit.FAILED}

    def broken(*_: Any, **__: Any) -> None:
        raise NodeEnded(Exit.FAILED, "this cannot be trained", "failed")

    world.patches.append(lambda patch: patch.setattr(batch, "ensure_batch", broken))
    world.run(lambda: _end_when_all_have(world))
    assert world.scheduler.violation is None, "\n".join(world.said)
    assert codes(world) == {0: Exit.FAILED, 1: Exit.FAILED, 2: Exit.FAILED}
    assert any("the train crew has ended: " in line and "cannot be trained" in line for line in world.said)


def test_crew_that_is_silent_is_named_and_held_for(world: World) -> None:
    killed: list[float] = []

    def over() -> bool:
        trainer = world.newest(2)
        if not killed and trainer is not None and trainer.place >= (2, 10):
            world.kill(trainer)
            killed.append(world.scheduler.now_s)
        return bool(killed) and world.scheduler.now_s > killed[0] + 120.0

    world.run(over)
    assert world.scheduler.violation is None, "\n".join(world.said)
    assert any("holding: the train crew (led by rank 2, host-2-" in line for line in world.said)
    assert any("the train crew (led by rank 2, host-2-" in line and "is back" in line for line in world.said)
    assert not any("engine" in line and "start" in line for line in world.said[-20:])
    assert codes(world) == {0: 0, 1: 0, 2: 0}


def _end_when_all_have(world: World) -> bool:
    if all(process.code is not None for process in world.processes) and len(world.processes) == NODES:
        world.scheduler.end()
    return False
