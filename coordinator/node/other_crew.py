"""The other crew of the run, as a node sees it: whether that has ended, and whether its master beats."""

import logging
import time

from coordinator.directory.layout import MASTER
from coordinator.machine.run_command import node_command
from coordinator.node.flags import read_call
from coordinator.node.identity import Identity
from coordinator.node.phase_endings import CODES
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.failed_starts import NOT_STARTED, FailedStarts
from coordinator.protocol.heartbeat import read_beat
from coordinator.protocol.liveness import Silence
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.placement_records import run_dirs
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, parse
from coordinator.settings.tree import RunSettings
from coordinator.start.inputs import difference
from rollout.storage import files

log = logging.getLogger(__name__)

CALLS = {event.name.lower(): code for event, code in CODES.items()}
"""Exit codes by the master's call with which a crew ends."""


class OtherCrew:
    """Follows the other crew's master. What that said before this process is of an earlier start."""

    def __init__(self, identity: Identity) -> None:
        crews = run_dirs(identity.root)
        (self._run_dir,) = [run_dir for run_dir in crews if run_dir.crew != identity.run_dir.crew]
        self.crew = self._run_dir.crew
        self._leads = crews[0] is self._run_dir
        self._records = Records(self._run_dir, identity.run_id)
        self._identity = identity
        self._cluster = identity.settings.cluster
        self._silence = Silence(self._cluster.beat_interval_s)
        self._is_lost = False
        self._host = ""
        calls = self._look().calls
        if self._leads and identity.is_master:  # its master lived at our START: it may have ended meanwhile
            calls = [flag for flag in calls if flag.epoch < identity.followed_epoch]
        self._old = frozenset(calls)
        self._failed_starts = FailedStarts(self._run_dir)

    def hear(self) -> None:
        """Raise Ended if the other crew has ended or given up. Log why a machine of it could not start. In
        whatever phase this crew is, or while it gathers: it must not work on, or hold, for a run that ended.
        """
        for flag in self._look().calls:
            if flag.rank != MASTER or flag in self._old:
                continue
            if flag.kind == NOT_STARTED and (error_text := self._failed_starts.new(flag)):
                log.error("%s. Then, on that machine: %s", error_text, self._command())
            if flag.kind in CALLS:
                text = f"the {self.crew} crew has ended: {read_call(self._run_dir, flag)}"
                raise NodeEnded(CALLS[flag.kind], text, flag.kind if self._identity.is_master else "left")

    def check(self) -> None:
        """Raise Ended if the other crew is away for too long. Log when it is lost, and when it is back."""
        board = self._look()
        self._silence.observe(board, [MASTER], time.monotonic())
        silent_s = self._silence.silent_s.get(MASTER, 0.0)
        is_lost = silent_s >= self._cluster.node_timeout_s
        policy = failure_policy(self._cluster.on_node_failure)
        if is_lost and not self._is_lost and policy.holds:
            text = "holding: %s is silent for %.0f s; to bring it back, on that machine: %s"
            log.error(text, self.describe(), silent_s, self._command())
        if self._is_lost and not is_lost:
            log.info("%s is back", self.describe())
        self._is_lost = is_lost
        if silent_s > policy.master_patience_s(self._cluster):
            text = f"{self.describe()} was silent for {silent_s:.0f} s. To resume, start all again; there: "
            raise NodeEnded(Exit.LOST, f"{text}{self._command()}", "gave_up")

    def other_settings(self) -> EpochRecord | None:
        """Return the newest record of the run's master, if that leads the other crew, and if its settings, or
        the code behind them, are not those that this crew goes by.
        """
        record = self._records.newest(self._look().records) if self._leads else None
        if record is None:
            return None
        me = self._identity
        is_other = difference(me.inputs.codes(), record.inputs, record.master_host) is not None
        return record if is_other or RunSettings.published(record.settings) != me.of_run else None

    def _command(self) -> str:
        return node_command(self._run_dir.root, self._run_dir.machine(MASTER))

    def describe(self) -> str:
        """Return `the train crew (led by rank 2, node-c)`."""
        rank = f"rank {self._run_dir.machine(MASTER)}"
        return f"the {self.crew} crew (led by {rank}, {self._host or 'which was not seen yet'})"

    def _look(self) -> Board:
        directory = self._run_dir.master
        crew = directory.parent
        # Its master makes these when it starts; a client may remember that they were missing.
        is_there = crew.name in files.listing(crew.parent) and directory.name in files.listing(crew)
        board = parse(files.listing(directory) if is_there else [])
        if not self._host and (beat := board.beats.get(MASTER)):
            self._host = str((read_beat(self._run_dir, beat) or {}).get("host", ""))
        return board
