"""Log lines of a node: each says which rank, iteration and phase it comes from."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.directory.line_writer import LineWriter
from coordinator.journal.control_characters import plain
from coordinator.journal.progress_reminder import Doing

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long the end of a node waits for its last lines to be in its log file."""
OURS = ("coordinator", "rollout", "trainer")


class Prefix(logging.Formatter):
    """`[rank 2 it 7 train_rollout] text`, with control characters spelled: the text may be a model's."""

    def __init__(self, rank: int | None, crew: str = "main") -> None:
        """`rank`: the machine's; None: of a guest."""
        super().__init__("%(message)s")
        name = f"rank {rank}" if rank is not None else "guest"
        self._name = name if crew == "main" else f"{crew} {name}"
        self._where: Callable[[], str] = lambda: ""
        self._elsewhere: Callable[[], str] = lambda: ""
        self._doing: Doing = lambda: ("start", "reading the tasks and the model" if rank == 0 else "starting")
        self._file: _File | None = None
        self._events: logging.Handler | None = None

    def follow(
        self, where: Callable[[], str], doing: Doing, elsewhere: Callable[[], str] = lambda: ""
    ) -> None:
        """Say where the node is (` it 7 train_rollout`, or nothing); `doing`: see `progress_reminders`;
        `elsewhere`: what to add to that of other nodes.
        """
        self._where, self._doing, self._elsewhere = where, doing, elsewhere

    def remind(self, text: str) -> None:
        """Log a reminder of what goes on."""
        log.info("%s%s", text, self._elsewhere())

    def doing(self) -> tuple[object, str]:
        """Return this node's present activity, as `follow` was told to find it."""
        return self._doing()

    def keep(self, directory: Path, events: logging.Handler) -> None:
        """From here on the lines also go to a file in `directory`, and warnings to the node's `events`."""
        self._file, self._events = _File(directory / f"node.{os.getpid()}.log", self), events
        logging.getLogger().addHandler(self._file)
        logging.getLogger().addHandler(events)

    def close(self) -> None:
        """End the file."""
        if self._events is not None:
            logging.getLogger().removeHandler(self._events)
        if self._file is not None:
            self._file.close()

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return plain(f"[{self._name}{self._where()}] {level}{super().format(record)}")


class _File(logging.Handler):
    """A log file on the shared directory, which nothing waits for; with the time, for people."""

    def __init__(self, path: Path, prefix: Prefix) -> None:
        super().__init__(logging.INFO)
        self.addFilter(is_for_people)
        self._writer = LineWriter(path, warns=False)
        self._prefix = prefix
        self._time = logging.Formatter("%(asctime)s", "%Y-%m-%d %H:%M:%S")

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self._time.formatTime(record, self._time.datefmt)} {self._prefix.format(record)}\n"
        self._writer.put(text.encode(errors="backslashreplace"))  # what a model says may be no text

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        self._writer.end()
        self._writer.join(CLOSE_S)
        super().close()


def is_for_people(record: logging.LogRecord) -> bool:
    """Return whether a line is shown: what this program or the user's code says, and warnings of anybody.

    Libraries, such as the HTTP client of an agent, have a line for each request.
    """
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(record.pathname).parts)
    return record.levelno > logging.INFO or not is_installed or record.name.partition(".")[0] in OURS


def set_up(rank: int | None, crew: str = "main") -> Prefix:
    """Log to stderr, each line with the prefix that is returned. The rank is the machine's; None: a guest."""
    prefix = Prefix(rank, crew)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(prefix)
    handler.setLevel(logging.INFO)
    handler.addFilter(is_for_people)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("rollout.storage.retry").setLevel(logging.DEBUG)  # for the node's events alone
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("watchdog").setLevel(logging.CRITICAL)  # it complains while it is being stopped
    return prefix
