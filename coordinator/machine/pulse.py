"""What a node shows its keeper on this machine's disk: that its interpreter runs, who it is, its signals."""

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from coordinator.machine import keeper
from coordinator.settings.placement import Crew

SIGNALS = "signals"
"""A file in the spool: a byte for each signal that the node was sent, its number."""


class Shown(TypedDict):
    """The content of a pulse."""

    root: str
    """The run directory."""
    crew: Crew
    rank: int
    incarnation: int
    beat_s: float
    patience_s: float
    """After this time without a pulse the keeper has the node stood in for."""
    react_s: float
    """How long its interpreter may be held once the node has to end."""
    pid: int


class Pulse:
    """Writes `show()` every PULSE_S in a thread, which stands still while the interpreter is held."""

    def __init__(self, spool: Path, show: Callable[[], Shown]) -> None:
        self._path = spool / keeper.PULSE
        self._show = show
        self._shown = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def begin(self) -> None:
        """Begin, once the node beats. The first pulse is there at once: the interpreter may be held any time
        from here on.
        """
        self._beat()
        self._thread.start()

    def close(self) -> None:
        """End it: from here on nobody stands in for this node."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(keeper.PULSE_S):
            self._beat()

    def _beat(self) -> None:
        temporary = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the keeper removes the spool at the end
            if (text := json.dumps(self._show())) == self._shown:
                os.utime(self._path)  # this works on a full disk too
                return
            temporary.write_text(text)
            os.replace(temporary, self._path)
            self._shown = text
