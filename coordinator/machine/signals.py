"""Signals that ask a node to end: a handler stores the number, and a thread acts.

A handler runs between two instructions of the main thread, which may just hold the lock of an Event that it
waits for: a handler that sets this Event waits for the lock, and the main thread for the handler.
"""

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Hands the first signal to `act`, in a thread. A second one ends the process at once: user code may hold
    the node, and the keeper does the rest.
    """

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._is_stored = False
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt itself

    def begin(self, record: Path) -> None:
        """Take over the signals of this process; for its main thread. Each number is appended to the file
        `record` as a byte, even while no thread of this process runs.
        """
        descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()
        for number in NUMBERS:
            signal.signal(number, self._store)

    def _store(self, number: int, _frame: object) -> None:
        if self._is_stored:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_stored = True
        self._numbers.put(number)

    def _run(self) -> None:
        self._act(self._numbers.get())
