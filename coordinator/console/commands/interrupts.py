"""The signals that ask a program with nodes below it to end."""

import signal

from coordinator.machine.signals import is_ignored_hangup


class Interrupts:
    """Note SIGINT, SIGTERM and SIGHUP from now on; the program asks for them when it can act.

    The first Ctrl+C is for the master, which tells the other nodes. A second one, or SIGTERM or SIGHUP, is
    for every node. After one more, the program must not wait for the nodes.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._seen = 0
        self._before = {
            # only note it: a signal may interrupt anything, code that holds a lock included
            number: signal.signal(number, lambda received, _frame: self.received.append(received))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if not is_ignored_hangup(number)
        }

    def close(self) -> None:
        """From now on signals do what they did before: nobody asks for them any more."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def has_new(self) -> bool:
        """Return whether a signal has come since the last call."""
        before, self._seen = self._seen, len(self.received)
        return self._seen > before

    @property
    def end_all(self) -> bool:
        """Whether every node is to end by itself, without the master's word."""
        return len(self.received) > 1 or any(number != signal.SIGINT for number in self.received)

    @property
    def end_waiting(self) -> bool:
        """Whether one more has come after `end_all`: do not wait for the nodes."""
        return len(self.received) > (2 if self.received[:1] == [signal.SIGINT] else 1)
