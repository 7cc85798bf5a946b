"""Random faults against two crews, one that generates and one that trains: the outcome is the serial replay's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.faults import ACTIONS, Fault, faults
from tests.simulation.test_simulation import NODES, run, searching, undisturbed

ITERATIONS = 4


@pytest.mark.parametrize("level", [0, 1, 3])
def test_two_crews_come_to_what_one_comes_to(level: int) -> None:
    options = {"iterations": ITERATIONS, "cluster__max_async_level": level}
    assert run(NODES, 3, (), trainers=1, **options) == undisturbed(ITERATIONS, level)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(
    seed=st.integers(0, 1000),
    happens=st.lists(faults(NODES, ACTIONS), min_size=1, max_size=5),
    level=st.sampled_from([0, 1, 3]),
    trainers=st.sampled_from([1, 2]),
)
def test_two_crews_come_through_all_faults(
    seed: int, happens: list[Fault], level: int, trainers: int
) -> None:
    options = {"iterations": ITERATIONS, "cluster__max_async_level": level}
    assert run(NODES, seed, happens, trainers=trainers, **options) == undisturbed(ITERATIONS, level)
