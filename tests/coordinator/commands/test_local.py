"""Nodes of one machine that are followed to their end."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.commands import local
from coordinator.protocol.exits import Exit


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A worker that waits for a master."""
    node = subprocess.Popen(["sleep", "60"])
    yield node
    node.kill()
    node.wait()


def test_workers_do_not_wait_for_a_master_that_refuses_to_start(
    waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    nodes: Any = [master, waiting]
    interrupts: Any = SimpleNamespace(has_new=lambda: False, end_all=False)
    looks = iter(range(100))
    sleep = local.time.sleep

    def look(seconds: float) -> None:
        assert next(looks, None) is not None, "the worker is still waiting"
        sleep(seconds)

    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=look))
    assert local._follow(nodes, interrupts)[0] == Exit.USAGE
    assert waiting.poll() is not None
