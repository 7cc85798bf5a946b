"""Judge the other nodes by what the directory shows: who is silent, who does not get on, what that means."""

import json
import logging
from collections.abc import Callable
from functools import partial

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import GUESTS, MASTER, RunDir
from coordinator.protocol.heartbeat import read_beats
from coordinator.protocol.liveness import Silence, Standstill, stall_limit_s
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.snapshot import Board
from coordinator.protocol.verdict import LOSSES, Verdict, decide, has_left
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.tree import RunSettings
from rollout.storage import files

log = logging.getLogger(__name__)

LOOK_BEATS = 5
"""After so many beats each, the others' progress is looked at: it is judged by the half hour."""
LOOKS_PER_S = 2.0
"""How many heartbeats a second the master reads for that, at most."""


class Judge:
    """What one node makes of the nodes that it judges: the master of the workers, a worker of the master."""

    def __init__(self, run_dir: RunDir, rank: int, settings: RunSettings) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._settings = settings
        self.silence = Silence(settings.cluster.beat_interval_s)
        self.standstill = Standstill(_look_interval_s(settings.cluster))
        self.trainer_failure_known = False
        """Whether this node has already acted on the training job's failure."""
        self._heard: set[Flag] = set()

    @property
    def _cluster(self) -> ClusterSettings:
        return self._settings.cluster

    def admit(self, record: EpochRecord, settings: RunSettings) -> None:
        """Judge in `record`'s epoch, under its `settings`; what came before is settled."""
        self._settings = settings
        self.silence.beat_every(settings.cluster.beat_interval_s)
        self.silence.restart(record.members)
        self.standstill = Standstill(_look_interval_s(settings.cluster))
        self.trainer_failure_known = False

    def observe(self, board: Board, current: EpochRecord | None, now_s: float) -> None:
        """Take in a successful listing, made at `now_s` (monotonic) in the epoch `current`, if in any."""
        judged = self._judged(current) if current else board.beats
        self.silence.observe(board, {*judged, *_guests_on(board)}, now_s)
        if current is not None:
            self._observe_progress(board, current, now_s)

    def decide(
        self, board: Board, newest: EpochRecord, current: EpochRecord, incarnation: int
    ) -> Verdict | None:
        """Return what ends the phase that this node is in, if anything does; see verdict.decide."""
        policy = failure_policy(self._cluster.on_node_failure)
        patience_s = policy.master_patience_s(self._cluster) if policy.holds else None
        return decide(
            board,
            newest,
            current,
            self._rank,
            incarnation,
            self.silence.silent_s,
            self._cluster.node_timeout_s,
            self.trainer_failure_known,
            patience_s,
            self._stalled(),
        )

    def is_held(self, verdict: Verdict) -> bool:
        """Return whether the phase's work goes on: the master may finish its share first."""
        finishes_share = failure_policy(self._cluster.on_node_failure).finishes_share
        return verdict.event in LOSSES and self._rank == MASTER and finishes_share

    def lost(self, verdict: Verdict | None, board: Board, current: EpochRecord | None) -> set[int]:
        """Return the ranks that are lost in the epoch `current`, that of the present `verdict` too."""
        limit_s = self._cluster.node_timeout_s
        lost = {rank for rank, silent_s in dict(self.silence.silent_s).items() if silent_s >= limit_s}
        judged = self._judged(current) if current else set[int]()
        lost |= {rank for rank in judged if has_left(board, current, rank)}
        if verdict is not None and verdict.rank is not None and verdict.event in LOSSES:
            lost.add(verdict.rank)
        return lost

    def guests(self, board: Board) -> dict[int, int]:
        """Return the guests that beat and get on, as the master sees them, and the incarnation of each."""
        limit_s, silent_s = self._cluster.node_timeout_s, dict(self.silence.silent_s)
        beating = {rank for rank in _guests_on(board) if silent_s.get(rank, 0.0) < limit_s}
        return {rank: board.beats[rank].incarnation for rank in sorted(beating - self._stalled())}

    def repeat_losses(self, board: Board, current: EpochRecord, trip: Callable[[str], None]) -> None:
        """Say once which node the master has declared lost: this node holds, with its engine warm.

        If this node is the lost one and still beats, it has to come back as another incarnation.
        """
        for flag in board.called(current.epoch, "lost"):
            if flag not in self._heard and self._rank != MASTER:
                try:
                    data = files.read(self._run_dir.entry(flag), fleeting=True)
                    document = json.loads(data)
                except (FileNotFoundError, ValueError):
                    continue  # the next look reads it
                self._heard.add(flag)
                if document.get("rank") == self._rank:
                    why = document["text"].partition(". To ")[0]
                    log.warning("the others took this node for lost; it comes back by itself (%s)", why)
                else:
                    log.warning("holding: %s", document["text"])
                if document["comes_anew"] == self._rank:
                    trip("the others go on without this node: they have found it lost")

    def _judged(self, current: EpochRecord) -> set[int]:
        """Return those whom this node judges: the master the workers, a worker the master."""
        return set(current.members) - {MASTER} if self._rank == MASTER else {MASTER}

    def _stalled(self) -> set[int]:
        """Return who beats, but does not get on, and had node_timeout more to find it out by itself."""
        return self.standstill.beyond(partial(stall_limit_s, self._settings), self._cluster.node_timeout_s)

    def _observe_progress(self, board: Board, current: EpochRecord, now_s: float) -> None:
        """Read, now and then, what the nodes that this one judges say of their progress."""
        if not self.standstill.is_due(now_s):
            return
        judged = self._judged(current) | (_guests_on(board) if self._rank == MASTER else set[int]())
        limit_s, silent_s = self._cluster.node_timeout_s, self.silence.silent_s
        beating = {rank for rank in judged & set(board.beats) if silent_s.get(rank, 0.0) < limit_s}
        self.standstill.forget(judged - beating)
        heartbeats = read_beats(self._run_dir, {rank: board.beats[rank] for rank in beating})
        self.standstill.observe({rank: content for rank, content in heartbeats.items() if content}, now_s)


def _guests_on(board: Board) -> set[int]:
    return {rank for rank in board.beats if rank >= GUESTS}


def _look_interval_s(cluster: ClusterSettings) -> float:
    return max(LOOK_BEATS * cluster.beat_interval_s, cluster.num_nodes / LOOKS_PER_S)
