"""What a master sees of the other crew of its run: whether that has ended, and whether its master beats."""

import logging
import time

from coordinator.directory.layout import MASTER, Flag, RunDir
from coordinator.node.flags import read_call
from coordinator.node.verdicts import CODES
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.heartbeat import read_beat
from coordinator.protocol.liveness import Silence
from coordinator.protocol.snapshot import Board, parse
from coordinator.settings import Crew, RunSettings
from rollout.storage import files

log = logging.getLogger(__name__)

CALLS = {event.name.lower(): code for event, code in CODES.items()}
"""Exit codes by the master's call with which a crew ends."""


class OtherCrew:
    """Follows the other crew's master. What that said before the first look is of an earlier start."""

    def __init__(self, run_dir: RunDir, settings: RunSettings) -> None:
        self.crew: Crew = "train" if run_dir.crew == "rollout" else "rollout"
        self._run_dir = RunDir(run_dir.root, self.crew)
        self._cluster = settings.cluster
        self._silence = Silence(self._cluster.beat_interval_s)
        self._old: frozenset[Flag] | None = None
        self._is_lost = False
        self._host = ""

    def check(self) -> None:
        """Raise Ended if the other crew has ended or given up, or is away for too long. Log when it is lost,
        and when it is back.
        """
        board = self._look()
        if self._old is None:
            self._old = frozenset(board.calls)
        for flag in board.calls:
            if flag.rank == MASTER and flag.kind in CALLS and flag not in self._old:
                text = f"the {self.crew} crew has ended: {read_call(self._run_dir, flag)}"
                raise Ended(CALLS[flag.kind], text, flag.kind)
        self._silence.observe(board, [MASTER], time.monotonic())
        silent_s = self._silence.silent_s.get(MASTER, 0.0)
        is_lost = silent_s >= self._cluster.node_timeout_s
        if is_lost and not self._is_lost:
            log.error("holding: %s is silent for %.0f s", self.describe(), silent_s)
        if self._is_lost and not is_lost:
            log.info("%s is back", self.describe())
        self._is_lost = is_lost
        if silent_s > self._cluster.master_patience_s:
            text = f"{self.describe()} was silent for {silent_s:.0f} s"
            raise Ended(Exit.LOST, text, "gave_up")

    def describe(self) -> str:
        """Return `the train crew (led by node-c)`."""
        return f"the {self.crew} crew ({f'led by {self._host}' if self._host else 'nobody was seen of it'})"

    def _look(self) -> Board:
        directory = self._run_dir.master
        crew = directory.parent
        # Its master makes these when it starts; a client may remember that they were missing.
        is_there = crew.name in files.listing(crew.parent) and directory.name in files.listing(crew)
        board = parse(files.listing(directory) if is_there else [])
        if not self._host and (beat := board.beats.get(MASTER)):
            self._host = str((read_beat(self._run_dir, beat) or {}).get("host", ""))
        return board
