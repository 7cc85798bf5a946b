"""torch's threads in the forks that train."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.job.rank import renew_threads

FORKS = 60
"""Forks, about ten of which fail without `renew_threads`; that none does happens once in 40,000 times."""


def in_fork(function: Callable[[], object]) -> int:
    """Return the exit code of a fork that calls the function; 1: it raised."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forks_that_load_a_model_in_threads_have_a_pool() -> None:
    tensors = [torch.ones(300_000, dtype=torch.bfloat16) for _ in range(16)]

    def load() -> None:
        renew_threads()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(torch.Tensor.float, tensors))

    def agent() -> None:
        torch.set_num_threads(2)
        assert not any(in_fork(load) for _ in range(FORKS))

    assert in_fork(agent) == 0
