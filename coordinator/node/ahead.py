"""Work that is done before a row asks for it."""

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
POLL_S = 0.5
"""How often a row that waits looks whether it is still wanted."""


class Ahead:
    """Works out one thing at a time in a thread, for a row that will ask for it.

    A row takes only what was worked out from what it would start from itself, and works out anything else
    itself. So nothing depends on this, and what fails here fails again in the row.
    """

    def __init__(self) -> None:
        self._begun: _Work | None = None

    def begin(self, key: object, work: Callable[[], Any]) -> None:
        """Begin with `work`, which may change nothing; `key` says what it starts from."""
        self._begun = _Work(key, work)

    def take(self, key: object, check: Callable[[], None]) -> Any:
        """Return what was worked out from `key`, once it is; None if that was not begun, or has failed.
        `check` is called again and again meanwhile, and may raise.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun.key != key:
            return None
        while begun.thread.is_alive():
            begun.thread.join(POLL_S)
            check()
        return begun.result


class _Work:
    def __init__(self, key: object, work: Callable[[], Any]) -> None:
        self.key = key
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(work,), name="ahead", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Exception as error:
            log.debug("%s: the row will say it", error)
