"""Fixtures: tiny random models on disk, and an embedded engine that serves one of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import make_model
from tests.rollout.rollout_helpers import RunningServer, serving


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[RunningServer]:
    """One server for all tests that leave it as they found it."""
    with serving(model_dir, "--weight-version", "first") as running:
        yield running
