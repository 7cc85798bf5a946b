"""Compute the figures of an evaluation: mean reward with its standard error, and pass@k."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.trajectory import Group


def pass_at_k(successes: Sequence[tuple[int, int]], k: int) -> float:
    """Return the chance that at least one of k samples of a task solves it, as the mean over the tasks. A
    task is given as (n, c): it has n samples, and c of them solved it.

    The unbiased estimator 1 - C(n - c, k) / C(n, k), as a product (Chen et al. 2021, arXiv 2107.03374).
    Raises ValueError if there is no task, or if a task has fewer than k samples.
    """
    if k < 1 or not successes or any(not 0 <= c <= n or n < k for n, c in successes):
        raise ValueError(
            f"pass_at_k: every task needs n >= k samples, 0 <= c <= n of which solve it; k is {k}"
        )
    none_solves = [float(np.prod(1.0 - k / np.arange(max(n - c, k - 1) + 1, n + 1))) for n, c in successes]
    return 1.0 - sum(none_solves) / len(none_solves)


def standard_error(rewards: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean over all samples, whose rewards are given by task; None for fewer
    than two tasks. The mean +- 1.96 of it is an interval that covers the score on all such tasks with 95 %.

    Tasks are drawn independently, and the samples of one task are not: it is clustered by task (Miller 2024,
    arXiv 2411.00640, with the factor G / (G - 1) for G tasks).
    """
    tasks = [task for task in rewards if task]
    if len(tasks) < 2:
        return None
    count = sum(map(len, tasks))
    mean = sum(map(sum, tasks)) / count
    squares = sum(sum(reward - mean for reward in task) ** 2 for task in tasks)
    return math.sqrt(squares * len(tasks) / (len(tasks) - 1)) / count


def evaluate(groups: Sequence[Group], success: float) -> dict[str, Any]:
    """`reward`: the mean over all samples that have a reward; `error`: its standard error, if there is one.
    `pass_at`: {"1": ..., "8": ...}, pass@k for k = 1 and for k = the samples of the largest group. A sample
    with a reward of at least `success` has solved its task. `short`: how many groups have lost samples; such
    a group counts for pass@1 only.

    Groups that were given up and lost samples are left out; they do not count as failed.
    """
    rewards = [
        [sample.reward for sample in group.samples if sample.reward is not None]
        for group in groups
        if group.given_up is None
    ]
    solved = [(len(group), sum(reward >= success for reward in group)) for group in rewards if group]
    if not solved:
        return {"reward": None, "error": None, "pass_at": {}, "short": 0}
    most = max(n for n, _ in solved)
    complete = [(n, c) for n, c in solved if n == most]
    return {
        "reward": float(np.mean(np.concatenate([group for group in rewards if group]))),
        "error": standard_error(rewards),
        "pass_at": {str(k): pass_at_k(complete if k > 1 else solved, k) for k in sorted({1, most})},
        "short": len(solved) - len(complete),
    }
