"""For all tests of the coordinator."""

from pathlib import Path

import pytest

from coordinator.directory.layout import RunDir
from tests.coordinator.examples import run_dir_at
from tests.coordinator.typed_command import place, run

__all__ = ["place", "run", "run_dir"]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run directory as a start makes it, with nothing in it."""
    return run_dir_at(tmp_path)
