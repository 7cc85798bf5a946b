"""Random numbers as a pure function of (seed, counter). There is no state, so no draw changes another one.

splitmix64 (Steele, Lea, Flood 2014) on whole arrays: the same bits on every machine and numpy version.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_2_64 = 2**64


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64, element by element: a bijection of the 64-bit integers."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def later(seed: int, draws: int) -> int:
    """Return the seed, as a signed 64-bit number, of the stream that begins at draw `draws` of the stream of
    `seed`: draw j of the one is draw `draws` + j of the other. So an engine that always counts from 0 can go
    on where another request has stopped.
    """
    mixed = int(mix64(np.array([seed % _2_64], dtype=np.uint64))[0])
    state = _unmix64((mixed + draws * int(_GOLDEN)) % _2_64)
    return state - _2_64 if state >= _2_64 // 2 else state


def _unmix64(x: int) -> int:
    """Return the y for which mix64(y) is x."""
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(int(_MIX_2), -1, _2_64) % _2_64
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(int(_MIX_1), -1, _2_64) % _2_64
    x ^= (x >> 30) ^ (x >> 60)
    return (x - int(_GOLDEN)) % _2_64


def random_bits(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each (seed, counter); the two arrays broadcast."""
    return mix64(mix64(seeds) + counters * _GOLDEN)


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a float64 in [0, 1) for each (seed, counter), of 53 random bits."""
    return (random_bits(seeds, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
