"""What a thread does while the phases go on."""

import subprocess
import sys
import threading

import pytest

from coordinator.directory.background import Background
from coordinator.protocol.exits import EpochChanged


def nothing() -> None:
    """Pass the check."""


def test_row_takes_what_was_worked_out_from_its_own_key() -> None:
    ahead, go = Background("ahead"), threading.Event()

    def work() -> str:
        assert go.wait(60)
        return "made"

    ahead.begin(work, (5, "manifest"))
    threading.Timer(0.05, go.set).start()
    assert ahead.take((5, "manifest"), nothing) == "made"
    assert ahead.take((5, "manifest"), nothing) is None, "it is taken once"


def test_what_was_worked_out_from_something_else_is_not_taken_and_not_waited_for() -> None:
    ahead, go = Background("ahead"), threading.Event()
    ahead.begin(lambda: go.wait(60), (5, "manifest"))
    assert ahead.take((5, "another manifest"), nothing) is None
    assert not go.is_set()
    go.set()


def test_failure_is_left_to_the_row() -> None:
    ahead = Background("ahead")
    ahead.begin(lambda: 1 / 0, 5)
    assert ahead.take(5, nothing) is None


def test_row_that_waits_hears_what_has_become_of_the_run() -> None:
    ahead, go = Background("ahead"), threading.Event()
    ahead.begin(lambda: go.wait(60), 5)

    def check() -> None:
        raise EpochChanged

    with pytest.raises(EpochChanged):
        ahead.take(5, check)
    go.set()


def test_thread_says_when_it_is_idle() -> None:
    background, go = Background("ahead"), threading.Event()
    assert background.is_idle()
    background.begin(lambda: go.wait(60))
    assert not background.is_idle()
    go.set()
    assert background.is_idle(60.0)


HANGS = """
import threading
from coordinator.directory.background import Background
begun = threading.Event()
Background("ahead").begin(lambda: begun.set() or threading.Event().wait(600))
assert begun.wait(60)
"""
"""A process that ends while a call in the background hangs."""


def test_no_process_waits_at_its_end_for_what_it_does_in_the_background() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)
