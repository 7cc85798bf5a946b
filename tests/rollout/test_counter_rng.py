"""Draws are a function of seed and counter, and a stream may be entered anywhere."""

import numpy as np
import pytest

from rollout.counter_rng import later, random_bits


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1, 2**62 + 7, 2**64 - 1, -5])
@pytest.mark.parametrize("draws", [0, 1, 4096, 2**40])
def test_later_stream_has_the_draws_of_the_first_from_there_on(seed: int, draws: int) -> None:
    counters = np.arange(8, dtype=np.uint64)
    first = random_bits(np.array([seed % 2**64], np.uint64), counters + np.uint64(draws))
    entered = later(seed, draws)
    assert -(2**63) <= entered < 2**63  # what an engine takes
    assert random_bits(np.array([entered % 2**64], np.uint64), counters).tolist() == first.tolist()
    assert later(entered, 3) == later(seed, draws + 3)
