"""What a node asks of the shared directory does not grow with the number of nodes, but for the master."""

from functools import cache

import pytest

from tests.simulation.many_nodes import Figures, measure

cost = cache(measure)


@pytest.mark.parametrize("nodes", [3, 64])
def test_node_that_waits_makes_few_calls(nodes: int) -> None:
    found: Figures = cost(nodes)
    assert found.waiting_mean <= 3.0 and found.waiting_worker <= 3.0, found


@pytest.mark.parametrize("nodes", [3, 64])
def test_row_costs_a_node_few_calls(nodes: int) -> None:
    found = cost(nodes)
    mean = (found.per_phase_master + (nodes - 1) * found.per_phase_worker) / nodes
    assert mean <= 12.0 and found.per_phase_worker <= 12.0, found


def test_worker_lists_no_more_names_and_makes_no_more_calls_among_many() -> None:
    few, many = cost(3), cost(64)
    assert many.listed_by_worker <= few.listed_by_worker + 5
    assert many.per_phase_worker <= few.per_phase_worker + 1.0


def test_many_nodes_gather_soon_and_pass_a_phase_soon() -> None:
    found = cost(64)
    assert found.start_s < 5.0 and found.longest_phase_s < 0.1, found


def test_slow_mount_lets_thirty_nodes_start() -> None:
    assert measure(30, latency_s=5e-3).start_s < 10.0
