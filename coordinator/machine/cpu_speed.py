"""The speed of this machine without a GPU."""

import time

WIDTH = 1024
TRIES = 5


def measured_flops() -> float:
    """Return the FLOP/s in float32 that all cores reach with large matrices, beside what else runs now."""
    import numpy as np  # here: it takes a while, and most commands need none

    matrix, least_s = np.ones((WIDTH, WIDTH), np.float32), float("inf")
    for _ in range(TRIES):
        began_s = time.perf_counter()
        _ = matrix @ matrix
        least_s = min(least_s, time.perf_counter() - began_s)
    return 2 * WIDTH**3 / least_s
