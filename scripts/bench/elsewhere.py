"""The work of other programs on this machine while a benchmark runs."""

import contextlib
import time

import psutil


class Elsewhere:
    """Measures how many cores other programs used: not this process or its descendants."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._since = (time.monotonic(), *self._busy_s())

    def cores(self) -> float:
        """Return the average since this was made."""
        since_s, machine_s, ours_s = self._since
        machine_now_s, ours_now_s = self._busy_s()
        elsewhere_s = (machine_now_s - machine_s) - (ours_now_s - ours_s)
        return round(max(0.0, elsewhere_s / (time.monotonic() - since_s)), 2)

    def _busy_s(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        ours_s = 0.0
        for process in (self._me, *self._me.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                ours = process.cpu_times()
                ours_s += ours.user + ours.system + ours.children_user + ours.children_system
        return machine.user + machine.nice + machine.system, ours_s
