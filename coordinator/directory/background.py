"""Work in a thread beside the run, on one thing at a time."""

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
POLL_S = 0.5
"""How often a phase that waits looks whether it is still wanted."""


class Background:
    """Does work that phases do not wait for. Nothing depends on it, and what fails here fails again in the
    phase that needs it.

    The process does not wait for it at its end, as it would for an executor: a call on the shared directory
    may hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: _BackgroundJob | None = None

    def begin(self, work: Callable[[], Any], key: object = None) -> None:
        """Begin with `work`; `key` says what it starts from. What was begun before is not taken any more."""
        self._begun = _BackgroundJob(self._name, work, key)

    def is_idle(self, timeout_s: float = 0.0) -> bool:
        """Return whether what was begun is over, after `timeout_s` at the latest."""
        if self._begun is None:
            return True
        self._begun.thread.join(timeout_s)
        return not self._begun.thread.is_alive()

    def take(self, key: object, check: Callable[[], None]) -> Any:
        """Return the result of the work on `key`, once it is there; None if it was not begun, or has failed.
        `check` is called again and again meanwhile, and may raise.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun.key != key:
            return None
        while begun.thread.is_alive():
            begun.thread.join(POLL_S)
            check()
        return begun.result


class _BackgroundJob:
    def __init__(self, name: str, work: Callable[[], Any], key: object) -> None:
        self.key = key
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
        self.thread.start()

    def _run(self, name: str, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Exception as error:
            log.debug("%s: %s: the phase will say it", name, error)
