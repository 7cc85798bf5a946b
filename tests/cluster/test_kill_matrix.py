"""The kill matrix: nodes, and their collectors, are killed at the flag of each row; the run ends as if
undisturbed.

`dying_node` says what `before` and `after` a flag mean. A run goes through a chain of kills, one at each row
of its first iteration: with a run for each of the 28, most of the time would go into importing torch. Half of
the killed nodes are restarted at once, the other half when the survivor has found them lost.
"""

import signal
from itertools import product
from typing import Any, NamedTuple

import pytest

from coordinator.directory.layout import MASTER
from coordinator.protocol.phase import Phase
from tests.cluster.cluster import Cluster
from tests.cluster.faults import durable_parts, lost_groups, repeated_groups, unsound_manifests
from tests.cluster.small_run import ITERATIONS, arguments, results

WORKER = 1
Results = list[dict[str, Any]]


class Kill(NamedTuple):
    """Where a node is killed, and when it comes back."""

    phase: Phase
    victim: int
    when: str
    is_found_lost: bool
    """Before it is restarted."""


def chain(number: int) -> list[Kill]:
    """One of two chains, which between them kill either node at each row's flag, one of them before it and
    the other after it. The simulation kills nodes at other calls of each row.
    """
    return [
        Kill(
            phase,
            victim=(phase + number) % 2,
            when=("before", "after")[(phase // 2 + number) % 2],
            is_found_lost=(phase // 4 + number) % 2 == 0,
        )
        for phase in Phase
    ]


def start(cluster: Cluster, engine_urls: list[str], rank: int, kill: Kill | None) -> None:
    """Start a node that is to die at `kill`."""
    dying = ["tests.cluster.dying_node", kill.phase.label, kill.when, "KILL"] if kill else ["coordinator.cli"]
    cluster.start(rank, *arguments(rank, engine_urls), program=dying)


def wait_until_dead(cluster: Cluster, rank: int) -> None:
    """Wait until a node has been killed at its place."""
    cluster.until(lambda: cluster.nodes[rank].poll() is not None, f"the end of rank {rank}", 120)
    assert cluster.nodes[rank].returncode == -signal.SIGKILL, cluster.everything_said()


def wait_until_lost(cluster: Cluster, survivor: int, victim: int, since: int) -> None:
    """Wait until the survivor says that the victim is lost, in its output from `since` on; or until it is
    dead too.
    """

    def says_so() -> bool:
        lines = cluster.output(survivor)[since:].splitlines()
        return any(f"rank {victim} (" in line and "is lost" in line for line in lines)

    cluster.until(
        lambda: says_so() or cluster.nodes[survivor].poll() is not None,
        f"rank {survivor} finds rank {victim} lost",
    )


def test_chains_kill_either_node_and_on_either_side_of_each_flag() -> None:
    kills = [kill for number in range(2) for kill in chain(number)]
    assert {(kill.phase, kill.victim) for kill in kills} == {*product(Phase, (MASTER, WORKER))}
    assert {(kill.phase, kill.when) for kill in kills} == {*product(Phase, ("before", "after"))}
    assert {(kill.phase, kill.is_found_lost) for kill in kills} == {*product(Phase, (True, False))}
    assert len({kill[1:] for kill in kills}) == 8, "each node, on each side, found lost and not"


@pytest.mark.parametrize("number", range(2))
def test_killed_nodes_come_back_and_the_run_ends_as_if_undisturbed(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results, number: int
) -> None:
    kills = chain(number)
    left = {rank: [kill for kill in kills if kill.victim == rank] for rank in (MASTER, WORKER)}
    for rank in (MASTER, WORKER):
        start(cluster, engine_urls, rank, left[rank].pop(0))
    kept: dict[Any, bytes] = {}
    begun: dict[int, int] = {MASTER: 0, WORKER: 0}
    said_before: dict[int, int] = {MASTER: 0, WORKER: 0}
    """By victim: how much the survivor had said when the victim was started."""
    found_lost = 0
    for kill in kills:
        victim = kill.victim
        wait_until_dead(cluster, victim)
        kept |= durable_parts(cluster.run_dir)
        # The plan is the master's alone: it may be making groups when its worker has died of the plan's flag.
        assert kill.phase == Phase.TRAIN_PLAN or bool(kept) == (kill.phase >= Phase.TRAIN_ROLLOUT)
        survivor = WORKER if victim == MASTER else MASTER
        # Else the survivor is just coming back from its own death: it waits for the other one to start.
        if kill.is_found_lost and " part (cluster epoch " in cluster.output(survivor)[begun[survivor] :]:
            wait_until_lost(cluster, survivor, victim, said_before[victim])
            found_lost += cluster.nodes[survivor].poll() is None
        begun[victim], said_before[victim] = len(cluster.output(victim)), len(cluster.output(survivor))
        start(cluster, engine_urls, victim, left[victim].pop(0) if left[victim] else None)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert found_lost
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert lost_groups(cluster.run_dir, kept) == []
    assert repeated_groups(cluster.run_dir) == []
    assert unsound_manifests(cluster.run_dir) == []
    assert results(cluster) == undisturbed


def test_collectors_killed_on_either_side_of_each_flag_cost_nothing(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results
) -> None:
    for rank in (MASTER, WORKER):
        dying = ["tests.cluster.dying_node", "each", "both", "COLLECTOR"]
        cluster.start(rank, *arguments(rank, engine_urls), program=dying)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    kills = {
        f"collector killed {when} the flag of row {row}." for row in Phase for when in ("before", "after")
    }
    for rank in (MASTER, WORKER):
        assert kills <= set(cluster.output(rank).splitlines())
    assert repeated_groups(cluster.run_dir) == unsound_manifests(cluster.run_dir) == []
    assert results(cluster) == undisturbed


def test_both_nodes_killed_at_once_come_back(
    cluster: Cluster, engine_urls: list[str], undisturbed: Results
) -> None:
    kept: dict[Any, bytes] = {}
    for phase in (Phase.TRAIN_ROLLOUT, Phase.TRAINING):
        for rank, when in ((MASTER, "before"), (WORKER, "after")):
            start(cluster, engine_urls, rank, Kill(phase, rank, when, is_found_lost=False))
        for rank in (MASTER, WORKER):
            wait_until_dead(cluster, rank)
        kept |= durable_parts(cluster.run_dir)
    for rank in (MASTER, WORKER):
        start(cluster, engine_urls, rank, None)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert kept and lost_groups(cluster.run_dir, kept) == repeated_groups(cluster.run_dir) == []
    assert results(cluster) == undisturbed
