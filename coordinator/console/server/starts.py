"""One start of a job, or of a guest of it: its process, from the claim to the exit code."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from coordinator.console.server.runner import EXIT, PROCESS
from coordinator.directory import published
from coordinator.machine.network import pid_space


class Conflict(RuntimeError):
    """The request does not fit to what the job is now."""


@dataclass(frozen=True)
class JobStart:
    """One start of a job, or of a guest of it."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name.partition("_")[2])

    def has(self, name: str) -> bool:
        """Return whether a file of the start is there."""
        return name in published.names(self.folder)

    def process(self) -> dict[str, Any] | None:
        """Return the claim of the process that was started; None if none was, or if the claim is damaged."""
        claim = published.read_json(self.folder / PROCESS)
        return claim if claim is not None and _is_claim(claim) else None

    def exit_code(self) -> int | None:
        """Return how it has ended; None while it runs, if nobody was there to see it, and if what they wrote
        is damaged.
        """
        code = (published.read_json(self.folder / EXIT) or {}).get("code")
        return code if isinstance(code, int) else None

    def is_alive(self) -> bool | None:
        """Return whether the process is there; None if that cannot be seen from this machine."""
        claim = self.process()
        if claim is None:
            return False
        if claim["pid_space"] != pid_space():
            return None
        return _process(claim) is not None or _process(claim["runner"]) is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there; Conflict if it is on another machine."""
        claim = self.process()
        if claim is not None and claim["pid_space"] != pid_space():
            raise Conflict(
                f"it was started on {claim['host']}: stop it from a server there, or there by hand"
            )
        process = _process(claim) if claim else None
        with contextlib.suppress(psutil.NoSuchProcess):
            if process is not None:
                process.send_signal(number)


def _is_claim(document: Mapping[str, Any]) -> bool:
    """Return whether a document says all that a process says of itself when it is started."""
    runner: Any = document.get("runner")
    processes: list[Mapping[str, Any]] = [document, runner if isinstance(runner, dict) else {}]
    return all(isinstance(document.get(name), str) for name in ("pid_space", "host")) and all(
        isinstance(entry.get("pid"), int) and isinstance(entry.get("created_s"), int | float)
        for entry in processes
    )


def _process(claim: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process of this machine that has said so; None if it has ended (ids are used again)."""
    try:
        process = psutil.Process(claim["pid"])
        is_same = abs(process.create_time() - claim["created_s"]) < 1.0
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None
