"""Time as a process has seen it pass."""

import threading
import time


class Stopwatch:
    """Seconds since `restart`, at most `step_s` for each look; for any thread.

    So a process that was stopped, or a machine that slept, does not find that somebody is late for it.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Begin at 0 again."""
        with self._lock:
            self._passed_s = 0.0
            self._last_s = time.monotonic()

    def look(self) -> float:
        """Seconds since `restart`. To be called more often than every `step_s`."""
        with self._lock:
            now_s = time.monotonic()
            self._passed_s += min(now_s - self._last_s, self._step_s)
            self._last_s = now_s
            return self._passed_s
