"""A run directory in which nothing has happened yet."""

from pathlib import Path

import pytest

from coordinator.directory.layout import FORMAT, RunDir
from tests.coordinator.examples import run_dir_at, write_json


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path)
    write_json(made.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    return made
