"""Machines that keep copies of what lies on a shared filesystem, fetch ahead, and make copies of deltas."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.machine import copying
from coordinator.machine import store as store_module
from coordinator.machine.filesystems import Mount
from coordinator.node.identity import Identity
from coordinator.node.policies import Policies
from coordinator.node.prefetch import Prefetch
from tests.simulation.faults import ACTIONS, Fault, faults
from tests.simulation.test_crews import ITERATIONS
from tests.simulation.test_simulation import NODES, run, searching, undisturbed

Rebuild = Callable[[Any, Path, str], bool]
CREWS: dict[str, Any] = {"trainers": 1, "iterations": ITERATIONS, "checkpoints__delta": True}


def with_copies(local: Path, rebuild: Callable[[Rebuild], Rebuild]) -> Callable[[pytest.MonkeyPatch], None]:
    """Put the run directory on a shared filesystem, and give each node a directory for copies below `local`;
    `rebuild` takes the place of what makes a file of a delta.
    """

    def mount(path: Path) -> Mount:
        return Mount("tmpfs" if path.is_relative_to(local) else "nfs4", "", "/")

    begin = Policies.__init__

    def begun(policies: Policies, identity: Identity, store: store_module.Store) -> None:
        below = local / f"{identity.run_dir.crew}-{identity.rank}"
        below.mkdir(parents=True, exist_ok=True)
        store._below = str(below)
        begin(policies, identity, store)

    def patch(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(store_module, "find_mount", mount)
        patched.setattr(copying, "_rebuild", rebuild(copying._rebuild))
        patched.setattr(Policies, "__init__", begun)

    return patch


@pytest.mark.parametrize(("damage", "level"), [("none", 1), ("gone", 0), ("other bytes", 1)])
def test_whole_policy_is_read_where_a_copy_is_of_no_use(tmp_path: Path, damage: str, level: int) -> None:
    """Every other copy of the policy before is damaged when it is needed."""
    turns, made = itertools.count(), Counter[tuple[bool, bool]]()

    def watched(real: Rebuild) -> Rebuild:
        def rebuild(asked: Any, target: Path, name: str) -> bool:
            damaged = damage != "none" and next(turns) % 2 == 0
            before: Path = asked.before[name]
            if damaged and damage == "gone":
                before.unlink()
            elif damaged:
                before.write_bytes(bytes(before.stat().st_size))
            is_made = real(asked, target, name)
            made[damaged, is_made] += 1
            return is_made

        return rebuild

    patch = with_copies(tmp_path, watched)
    policy = run(NODES, 3, (), patch, cluster__max_async_level=level, **CREWS)
    assert policy == undisturbed(ITERATIONS, level)
    assert made[False, True] and not made[False, False] and not made[True, True]
    assert bool(made[True, False]) == (damage != "none")


@pytest.mark.parametrize("trainers", [0, 1])
def test_each_node_that_generates_fetches_the_next_policy_while_it_generates(
    tmp_path: Path, trainers: int
) -> None:
    """With K = 1 iterations 3 and 4 are sampled by the policies of 1 and 2."""
    fetched, filled = set[tuple[str, int, int]](), Counter[tuple[str, str]]()

    def patch(patched: pytest.MonkeyPatch) -> None:
        with_copies(tmp_path, lambda real: real)(patched)
        fetch, fill = Prefetch._run, copying.fill

        def watched(prefetch: Prefetch, iteration: int, *more: Any) -> None:
            fetch(prefetch, iteration, *more)
            identity = prefetch._policies._identity
            fetched.add((identity.run_dir.crew, identity.rank, iteration))

        def filling(entry: Path, asked: Any) -> None:
            fill(entry, asked)
            filled[entry.parent.parent.name, asked.source.name] += 1

        patched.setattr(Prefetch, "_run", watched)
        patched.setattr(copying, "fill", filling)

    options = {**CREWS, "trainers": trainers, "cluster__max_async_level": 1}
    assert run(NODES, 3, (), patch, **options) == undisturbed(ITERATIONS, 1)
    crew, ranks = ("rollout", 2) if trainers else ("main", 3)
    assert fetched == {(crew, rank, iteration) for rank in range(ranks) for iteration in (1, 2)}
    assert set(filled.values()) == {1}, "nothing is copied twice"


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(
    seed=st.integers(0, 1000),
    happens=st.lists(faults(NODES, ACTIONS), min_size=1, max_size=5),
    level=st.sampled_from([0, 1, 3]),
    trainers=st.sampled_from([0, 1, 2]),
)
def test_copies_and_deltas_come_through_all_faults(
    tmp_path_factory: pytest.TempPathFactory, seed: int, happens: list[Fault], level: int, trainers: int
) -> None:
    patch = with_copies(tmp_path_factory.mktemp("copies"), lambda real: real)
    options = {**CREWS, "trainers": trainers, "cluster__max_async_level": level}
    assert run(NODES, seed, happens, patch, **options) == undisturbed(ITERATIONS, level)
