"""All simulated processes are threads of which one runs at a time: on one core they take turns faster."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def on_one_core() -> Iterator[None]:
    """Keep the threads of a test on one core; those of each worker of the test session on another one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
