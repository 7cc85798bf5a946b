"""Show on the node's terminal what user code prints in the collector."""

import logging
import time
from pathlib import Path

from rollout.processes.killable_process import LINES_A_SECOND

log = logging.getLogger(__name__)


class Echo:
    """Shows what user code prints, LINES_A_SECOND at most; the log file has the rest, too."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._second = self._lines = 0

    def __call__(self, line: str) -> None:
        second = int(time.monotonic())
        self._lines = self._lines + 1 if second == self._second else 1
        self._second = second
        if self._lines <= LINES_A_SECOND:
            log.info("collector: %s", line)
        elif self._lines == LINES_A_SECOND + 1:
            text = "collector: (it prints more than %d lines a second: the others are in %s alone)"
            log.info(text, LINES_A_SECOND, self._log_file)
