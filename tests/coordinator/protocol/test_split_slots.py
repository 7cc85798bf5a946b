"""The weighted split: every slot exactly once, shares as close to the weights as whole slots allow."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.split_slots import share_sizes, split_slots

POSITIVE = st.one_of(
    st.integers(1, 8).map(float),
    st.floats(min_value=1e-300, max_value=1e300, allow_nan=False),
    st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 5e-324, 1.7e308]),
)
WEIGHTS = st.dictionaries(st.integers(0, 63), POSITIVE, min_size=1, max_size=16)


@given(slots=st.lists(st.integers(0, 10_000), unique=True, max_size=300), weights=WEIGHTS)
def test_split_gives_every_slot_to_exactly_one_rank(slots: list[int], weights: dict[int, float]) -> None:
    shares = split_slots(slots, weights)
    assert set(shares) == set(weights)
    assert sorted(slot for share in shares.values() for slot in share) == sorted(slots)


@given(total=st.integers(0, 100_000), weights=WEIGHTS)
def test_share_is_within_one_of_the_exact_quota(total: int, weights: dict[int, float]) -> None:
    whole = sum(map(Fraction, weights.values()))
    sizes = share_sizes(total, weights)
    assert sum(sizes.values()) == total
    for rank, size in sizes.items():
        assert abs(size - total * Fraction(weights[rank]) / whole) < 1


@given(total=st.integers(0, 10_000), weights=WEIGHTS)
def test_heavier_rank_never_gets_less(total: int, weights: dict[int, float]) -> None:
    sizes = share_sizes(total, weights)
    by_weight = sorted(weights, key=lambda rank: (weights[rank], sizes[rank]))
    assert [sizes[rank] for rank in by_weight] == sorted(sizes.values())


@given(total=st.integers(0, 10_000), weights=WEIGHTS)
def test_split_depends_on_the_weights_alone_not_on_their_order(total: int, weights: dict[int, float]) -> None:
    backwards = dict(reversed(weights.items()))
    assert split_slots(range(total), weights) == split_slots(range(total), backwards)


@pytest.mark.parametrize(
    ("total", "weights", "sizes"),
    [
        (1024, [1, 1, 1], [342, 341, 341]),
        (7, [1] * 8, [1] * 7 + [0]),
        (2000, [2, 1, 1], [1000, 500, 500]),
        (0, [2, 1], [0, 0]),
        (1, [1, 1, 5], [0, 0, 1]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (3, [0.5], [3]),
    ],
)
def test_split_of_known_examples(total: int, weights: list[float], sizes: list[int]) -> None:
    assert list(share_sizes(total, dict(enumerate(weights))).values()) == sizes


def test_share_is_a_run_of_consecutive_slots_of_those_that_are_left() -> None:
    assert split_slots([3, 4, 9, 11], {0: 2, 2: 1, 5: 1}) == {0: [3, 4], 2: [9], 5: [11]}


@pytest.mark.parametrize("weights", [{}, {0: 1.0, 1: 0.0}, {0: -1.0}])
def test_weights_that_are_not_positive_are_refused(weights: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="positive, one for each rank"):
        share_sizes(8, weights)
