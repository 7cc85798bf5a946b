"""Random numbers as a pure function of (seed, counter). There is no state, so no draw changes another one.

splitmix64 (Steele, Lea, Flood 2014) on whole arrays: the same bits on every machine and numpy version.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64, element by element: a bijection of the 64-bit integers."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def random_bits(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each (seed, counter); the two arrays broadcast."""
    return mix64(mix64(seeds) + counters * _GOLDEN)


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a float64 in [0, 1) for each (seed, counter), of 53 random bits."""
    return (random_bits(seeds, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
