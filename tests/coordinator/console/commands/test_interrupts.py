"""Signals to a program that has nodes below it: who is to end, and when nobody waits any longer."""

import os
import signal
from collections.abc import Iterator

import pytest

from coordinator.console.commands.interrupts import Interrupts

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handlers = {number: signal.getsignal(number) for number in (INT, TERM, HUP)}
    yield Interrupts()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("numbers", "end_all", "end_waiting"),
    [
        ([], False, False),
        ([INT], False, False),
        ([INT, INT], True, False),
        ([INT, INT, INT], True, True),
        ([INT, TERM], True, False),
        ([TERM], True, False),
        ([HUP, INT], True, True),
    ],
)
def test_signals_end_first_the_master_then_all_nodes_then_the_waiting(
    interrupts: Interrupts, numbers: list[signal.Signals], end_all: bool, end_waiting: bool
) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
    assert (interrupts.end_all, interrupts.end_waiting) == (end_all, end_waiting)


def test_signals_do_what_they_did_before_once_nobody_asks_for_them(interrupts: Interrupts) -> None:
    later = Interrupts()
    later.close()
    os.kill(os.getpid(), INT)
    assert (later.received, interrupts.received) == ([], [INT])


def test_signal_is_new_once(interrupts: Interrupts) -> None:
    assert not interrupts.has_new()
    os.kill(os.getpid(), INT)
    assert interrupts.has_new() and not interrupts.has_new()
    os.kill(os.getpid(), INT)
    assert interrupts.has_new()
