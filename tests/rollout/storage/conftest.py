"""A shared directory whose calls fail as those of NFS do, and limits that are soon reached."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.storage import once, retry
from tests.faultfs import FaultFs, unavailable


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as mounts:
        yield mounts
        mounts.thaw()


@pytest.fixture
def soon_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "TORN_S", 0.3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.2)
