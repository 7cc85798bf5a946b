"""What the console asks `run` for is answered by forks, which need not import it."""

import pytest

from coordinator.machine import run_command
from tests.commands import ask_forked


@pytest.fixture(autouse=True)
def _run_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command, "ask_run", ask_forked)
