"""A line whenever nothing was logged for a while: what goes on."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator

FIRST_S = 10.0
"""After this long without a line the first one says what goes on."""
LONGEST_S = 60.0
"""Pauses between two such lines double up to this long, as long as the same goes on."""
NEW_S = 3.0
"""What has begun just now is said only after another such pause: `training, 0 s so far` says nothing."""
LOOK_S = 1.0

log = logging.getLogger(__name__)
Doing = Callable[[], tuple[object, str]]
"""Returns what goes on: something that is equal while the same goes on, and a line that says it."""


class ProgressReminder(logging.Handler):
    """Hears all lines that are logged; `look` says what goes on when none has come for long enough."""

    def __init__(
        self,
        doing: Doing,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        first_s: float = FIRST_S,
    ) -> None:
        super().__init__(logging.INFO)
        self._doing = doing
        self._say = say
        self._now_s = now_s
        self._first_s = self._pause_s = first_s
        self._heard_s = self._began_s = now_s()
        self._same: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note that a line was logged."""
        self._heard_s = self._now_s()

    def look(self) -> None:
        """Say what goes on, if nothing was said for the present pause."""
        same, text = self._doing()
        if same != self._same:
            self._same, self._pause_s, self._began_s = same, self._first_s, self._now_s()
        is_new = self._now_s() - self._began_s < NEW_S
        if self._now_s() - self._heard_s >= self._pause_s * (2 if is_new else 1):
            self._heard_s = self._now_s()
            self._pause_s = min(2 * self._pause_s, max(LONGEST_S, self._first_s))
            self._say(text)


@contextlib.contextmanager
def progress_reminders(
    doing: Doing, say: Callable[[str], None] = log.info, first_s: float = FIRST_S
) -> Generator[None]:
    """Say what goes on, meanwhile, whenever nothing was logged for `first_s` or longer."""
    silence, ended = ProgressReminder(doing, say, first_s=first_s), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            silence.look()

    logging.getLogger().addHandler(silence)
    thread = threading.Thread(target=watch, name="silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        logging.getLogger().removeHandler(silence)
        thread.join(LOOK_S)  # it may wait for a terminal that accepts no output
