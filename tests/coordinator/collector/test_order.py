"""What a collector says to its node of an error."""

import errno
import os
from pathlib import Path

import pytest

from coordinator.collector.order import CollectorFailed, describe_error, error_of
from coordinator.protocol.fence import is_away
from rollout.storage.files import SharedFsError


def test_directory_that_is_gone_for_the_collector_is_gone_for_its_node(tmp_path: Path) -> None:
    """Nothing is mounted there: it may come back, and is no failure of the run."""
    with pytest.raises(FileNotFoundError) as gone:
        os.listdir(tmp_path / "claims")
    error = error_of(describe_error(gone.value))
    assert isinstance(error, SharedFsError) and error.errno == errno.ENOENT and is_away(error)
    assert f"{tmp_path}/claims" in str(error)
    assert isinstance(error_of(describe_error(ValueError("a mistake"))), CollectorFailed)
