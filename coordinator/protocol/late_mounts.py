"""Notice a mount that shows the files of other nodes late whatever this node does, as rclone's caches do.

rclone keeps a listing for `--dir-cache-time`, and puts what its own client makes into it: neither a name of
ours nor a look at a name makes it ask anew. Heartbeats come at a known pace, so a listing that shows several
new ones of a rank at once has hidden the first of them. A node that has left its epoch, to gather the others
or to wait for the master, beats faster, so what it shows proves nothing.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from coordinator.directory.file_names import Beat
from coordinator.protocol.snapshot import Board

log = logging.getLogger(__name__)

LATE_S = 1.0
"""A name that was hidden for longer than this, beyond the pause between two listings, is late."""
EVIDENCE = 3
"""So many late names are no accident."""


class LateNames:
    """Says once that names come late here, and how late."""

    def __init__(self, takes_part: Callable[[Beat], bool]) -> None:
        """`takes_part`: whether the node that has shown a beat is in the beat's epoch still."""
        self._takes_part = takes_part
        self._times = 0
        self.late_s = 0.0

    def observe(self, before: Board, after: Board, epoch: int, beat_s: float, passed_s: float) -> None:
        """Compare two listings that were made `passed_s` apart in an epoch whose nodes beat each `beat_s`."""
        for rank, beat in after.beats.items():
            last = before.beats.get(rank)
            if last is not None and last[:3] == beat[:3] and beat.epoch == epoch:
                hidden_s = (beat.counter - last.counter - 1) * beat_s - passed_s
                if hidden_s > LATE_S and self._takes_part(beat):
                    self._times += 1
                    self.late_s = max(self.late_s, hidden_s)

    def say(self, directory: Path) -> None:
        """Log it once, when it is certain."""
        if self._times >= EVIDENCE:
            self._times = -(1 << 60)
            log.warning(
                "%s: this mount shows the names of others at least %.1f s late, and nothing that a node does "
                "shows them sooner: an iteration waits that long about ten times. Turn its cache of "
                "directories off (run doctor --peers N says how)", directory, self.late_s,
            )  # fmt: skip
