"""Guests in simulated runs: they come and go as they like, and the run ends as it does without them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.directory.layout import GUESTS
from coordinator.directory.parts import PartWriter
from tests.simulation.faults import ACTIONS, Fault, faults
from tests.simulation.test_simulation import EXAMPLES, NODES, SEGMENTS, run, searching

MORE: dict[str, Any] = {"rollout__tasks_per_iteration": 18}


def as_guest(fault: Fault) -> Fault:
    return replace(fault, rank=GUESTS + fault.rank, iteration=min(fault.iteration + 1, 3))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many groups guests have made durable, by iteration; 0: those of nodes."""
    counts: Counter[int] = Counter()
    flush: Callable[[PartWriter], Any] = PartWriter.flush

    def count(writer: PartWriter) -> Any:
        if (written := flush(writer)) is not None:
            header = writer._header
            counts[header.iteration * (header.rank >= GUESTS)] += len(written.groups)
        return written

    monkeypatch.setattr(PartWriter, "flush", count)
    return counts


@cache
def alone(iterations: int, **options: Any) -> str:
    """The policy of a run of one node without guests."""
    return run(1, 0, (), iterations=iterations, **options)


@pytest.mark.parametrize("nodes", [1, NODES])
@pytest.mark.parametrize("guests", [1, 3])
def test_guests_make_groups_and_change_no_sample(nodes: int, guests: int, made: Counter[int]) -> None:
    alone.cache_clear()
    expected, each = alone(3, **MORE), made.total()
    for seed in range(3, 7):  # in one of them the nodes may leave nothing for a guest that looks a bit later
        made.clear()
        assert run(nodes, seed, (), guests=guests, iterations=3, **MORE) == expected
        assert made.total() == each, made
        if {2, 3} <= made.keys():
            return
    raise AssertionError("no guest has helped in both later iterations")


@pytest.mark.parametrize("action", ["kill", "leave", "pause", "replace", "freeze", "engine", "collector"])
def test_guests_that_go_in_the_middle_of_a_row_cost_nothing(action: Any) -> None:
    """At its first call, and later."""
    seconds = 3.0 if action in {"kill", "leave"} else 60.0
    places = ((GUESTS, 2, 0), (GUESTS + 1, 2, 6), (GUESTS + 2, 3, 14))
    happens = [Fault(action, guest, number, 2, calls, seconds) for guest, number, calls in places]
    assert run(2, 0, happens, guests=3, iterations=4) == alone(4)


def is_fair(happens: list[Fault]) -> bool:
    """A collector that ends twice while it makes nothing ends its node, or its guest, for good."""
    return sum(fault.action == "collector" for fault in happens) < 2


fewer = settings(searching, max_examples=int(EXAMPLES or 4))
guests_too = st.lists(
    st.one_of(faults(NODES, ACTIONS), faults(3, ACTIONS).map(as_guest)), min_size=1, max_size=6
).filter(is_fair)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@fewer
@given(
    seed=st.integers(0, 1000), happens=guests_too, has_links=st.booleans(),
    policy=st.sampled_from(["wait", "shrink"]),
)  # fmt: skip
def test_guests_and_nodes_come_through_all_faults(
    seed: int, happens: list[Fault], has_links: bool, policy: str
) -> None:
    options = {"iterations": 3, "cluster__on_node_failure": policy}
    assert run(NODES, seed, happens, has_links=has_links, guests=3, **options) == alone(3)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@fewer
@given(seed=st.integers(0, 1000), happens=guests_too, trainers=st.integers(0, 1))
def test_guests_take_part_in_whatever_is_generated(seed: int, happens: list[Fault], trainers: int) -> None:
    """Samples go on from iteration to iteration, evaluations are large, and there may be two crews."""
    options = {"eval__max_tasks": 6, "cluster__max_async_level": 1, **SEGMENTS, **MORE}
    nodes = NODES + trainers
    assert run(nodes, seed, happens, trainers=trainers, guests=3, iterations=3, **options) == alone(
        3, **options
    )


@pytest.mark.parametrize("seed", range(2))
def test_flat_groups_of_guests_are_replaced_by_nodes(seed: int, made: Counter[int]) -> None:
    """Which groups count depends on who is early, so the invariants alone are looked at."""
    spare = {"rollout__dynamic_sampling": True, "rollout__dynamic_limit": 6.0, **MORE}
    run(2, seed, [Fault("kill", GUESTS, 2, 2, 6, 3.0)], guests=2, iterations=3, **spare)
    assert made[2] or made[3], made
