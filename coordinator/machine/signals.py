"""Signals that ask a node to end: a handler stores the number, and a thread acts.

A handler runs between two instructions of the main thread, which may just hold the lock of an Event that it
waits for: a handler that sets this Event waits for the lock, and the main thread for the handler.

While the main thread waits in a call on a hung mount, the kernel keeps a signal for it, and no handler runs.
So the thread looks for such signals too, and takes them. To see them it blocks them for itself. The main
thread must not block them: whatever program it starts, the user's too, would ignore them as well.
"""

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.5
"""How often the thread looks for signals that the main thread does not take."""


def is_ignored_hangup(number: int) -> bool:
    """Return whether a signal is SIGHUP, and `nohup` or the like had it ignored: that stays so."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def need_signals() -> None:
    """Have this process hear signals, and of children that end, whatever has started it. Where SIGCHLD is
    ignored the exit code of each child is lost, and counts as 0.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Signals:
    """Hands the first signal to `act`, in a thread. A second one ends the process at once: user code may hold
    the node, or a hung mount, and the reaper does the rest.
    """

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._is_stored = False
        self._stored: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt itself

    def begin(self, record: Path) -> None:
        """Take over the signals of this process; for its main thread. Each number is appended to the file
        `record` as a byte, even while no thread of this process runs.
        """
        descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(record,), name="signals", daemon=True).start()
        for number in NUMBERS:
            if not is_ignored_hangup(number):
                signal.signal(number, self._store)

    def _store(self, number: int, _frame: object) -> None:
        if self._is_stored:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_stored = True
        self._stored.put(number)

    def _run(self, record: Path) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        received: list[int] = []
        with open(record, "rb") as file:
            while len(received) < 2:
                with contextlib.suppress(queue.Empty):
                    self._stored.get(timeout=LOOK_S)
                if signal.sigpending() & set(NUMBERS):  # here they are recorded, and go on to the handler
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
                    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
                is_first = not received
                received += [number for number in file.read() if number in NUMBERS]
                if is_first and received:
                    self._act(received[0])
        os.kill(os.getpid(), signal.SIGKILL)  # the main thread runs no handler
