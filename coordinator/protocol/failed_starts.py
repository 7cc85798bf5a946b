"""The last word of a worker that ends before it is in an epoch. The master, which waits for it, passes that
on; no verdict heeds it.
"""

import json
import time

from coordinator.directory import published
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from rollout.storage import files

NOT_STARTED = "not_started"
"""The kind of its flag, which is raised in the newest epoch."""
AGAIN_S = 5.0
"""How often the master reads a flag again: another process of the rank may say something else."""


def report_failed_start(run_dir: RunDir, epoch: int, rank: int, host: str, text: str) -> None:
    """Say in `epoch` why the worker `rank` does not come."""
    document = json.dumps({"text": text, "host": host})
    files.publish(run_dir.entry(Flag(epoch, 0, 0, rank, NOT_STARTED)), document.encode(), durable=False)


def read_failed_start(run_dir: RunDir, flag: Flag) -> tuple[str, str] | None:
    """Return host and text of a complaint, without the command to type; None if it is gone or damaged."""
    document = published.read_json(run_dir.entry(flag)) or {}
    host, text = document.get("host"), document.get("text")
    if not isinstance(host, str) or not isinstance(text, str):
        return None
    return host, text.partition(". To ")[0]


class FailedStarts:
    """Reads the complaints of workers, for a master that waits for them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read: dict[Flag, tuple[float, str]] = {}

    def new(self, flag: Flag) -> str | None:
        """Return the text of a complaint, unless it was returned before."""
        read_s, before = self._read.get(flag, (float("-inf"), ""))
        if time.monotonic() - read_s < AGAIN_S:
            return None
        _, text = read_failed_start(self._run_dir, flag) or ("", before)
        self._read[flag] = time.monotonic(), text
        return text if text != before else None
