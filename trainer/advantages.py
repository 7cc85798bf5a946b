"""Group-relative advantages. Torch-free."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def group_advantages(rewards: ArrayLike) -> NDArray[np.float32] | None:
    """Advantages of one group's samples, A = r - mean(r); not divided by the std (Dr.GRPO, arXiv 2503.20783).

    `rewards` (n,) holds the samples that exist: a cancelled or failed one is left out by the caller, it is
    not a zero. Returns (n,) float32, or None when the group teaches nothing: fewer than two samples, or no
    variance.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"rewards of a group are one-dimensional, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"a reward is not a finite number: {values.tolist()}; check the reward function")
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    return (values - values.mean()).astype(np.float32)
