"""What a thread works out before a row asks for it."""

import threading

import pytest

from coordinator.node.ahead import Ahead
from coordinator.protocol.exits import EpochChanged


def nothing() -> None:
    """Pass the check."""


def test_row_takes_what_was_worked_out_from_its_own_key() -> None:
    ahead, go = Ahead(), threading.Event()

    def work() -> str:
        assert go.wait(60)
        return "made"

    ahead.begin((5, "manifest"), work)
    threading.Timer(0.05, go.set).start()
    assert ahead.take((5, "manifest"), nothing) == "made"
    assert ahead.take((5, "manifest"), nothing) is None, "it is taken once"


def test_what_was_worked_out_from_something_else_is_not_taken_and_not_waited_for() -> None:
    ahead, go = Ahead(), threading.Event()
    ahead.begin((5, "manifest"), lambda: go.wait(60))
    assert ahead.take((5, "another manifest"), nothing) is None
    assert not go.is_set()
    go.set()


def test_failure_is_left_to_the_row() -> None:
    ahead = Ahead()
    ahead.begin(5, lambda: 1 / 0)
    assert ahead.take(5, nothing) is None


def test_row_that_waits_hears_what_has_become_of_the_run() -> None:
    ahead, go = Ahead(), threading.Event()
    ahead.begin(5, lambda: go.wait(60))

    def check() -> None:
        raise EpochChanged

    with pytest.raises(EpochChanged):
        ahead.take(5, check)
    go.set()
