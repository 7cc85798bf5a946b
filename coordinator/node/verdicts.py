"""Where a node stands: who it is, what it sees, and what it says of itself and of the others."""

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from coordinator.directory.layout import Flag, RunDir
from coordinator.machine import network
from coordinator.machine.gpus import GpuSampler, count_gpus
from coordinator.node.inputs import local_processes
from coordinator.node.start import Start
from coordinator.protocol.exits import Ended, EpochChanged, Exit, Fenced, NodeLost, TrainerFailed
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import MASTER, EpochRecord, Event, Verdict
from coordinator.protocol.snapshot import Board
from coordinator.protocol.watch import Watch
from rollout.storage import files
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)

Payload = dict[str, Any]

FLAG_PATIENCE_S = 5.0
"""How long a flag that was listed may be missing or torn when it is read."""


@dataclass
class Position:
    """Where this node is, as its heartbeat says. Moments are of this node's monotonic clock."""

    state: str = "starting"
    iteration: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    waiting_for: list[int] = field(default_factory=list[int])
    tokens: int = 0
    """Generated in this row."""
    since_s: float = field(default_factory=lambda: time.monotonic())
    waiting_since_s: float | None = None
    counting_since_s: float | None = None
    reached_s: float = 0.0

    def reach(self, done: int, total: int, tokens: int) -> None:
        """Progress in this row."""
        self.reached_s = time.monotonic()
        if done == 0 or self.counting_since_s is None:
            self.counting_since_s = self.reached_s
        self.done, self.total, self.tokens = done, total, tokens

    def prefix(self) -> str:
        """As log lines begin: ` it 7 train_rollout`, or nothing."""
        return f" it {self.iteration} {self.phase}" if self.phase else ""

    def describe(self) -> dict[str, Any]:
        """As a heartbeat says it, with what follows from the moments: seconds, and tokens per second."""
        now_s = time.monotonic()
        counted_s = self.reached_s - (self.counting_since_s or self.reached_s)
        waits = bool(self.waiting_for)
        return {
            "state": self.state,
            "iteration": self.iteration,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "waiting_for": self.waiting_for,
            "row_s": round(now_s - self.since_s, 1),
            "waiting_s": round(now_s - (self.waiting_since_s or self.since_s), 1) if waits else 0.0,
            "tokens_per_s": round(self.tokens / counted_s, 1) if self.tokens and counted_s else None,
            "left_s": round(counted_s * (self.total / self.done - 1), 1) if self.done else None,
        }


class Standing:
    """A node's identity and its view of the run; turns what it sees into words and into the end of a row."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.is_master = start.rank == MASTER
        self.run_dir: RunDir = start.run_dir
        self.run_id = start.run_id
        self.settings = start.settings
        self.newest_epoch = start.newest_epoch
        self.host = socket.gethostname()
        self.peer = network.this_peer()
        self.address = network.LOOPBACK
        self.position = Position()
        self.record: EpochRecord
        self.watch = Watch(
            self.run_dir,
            self.rank,
            self.settings.cluster,
            self.describe,
            stall_limit_s=self._stall_limit_s,
            end_training=self.end_training,
        )
        self._master_is_lost = False
        self.gpus = GpuSampler(self.settings.cluster.beat_s)
        self._processes = local_processes(self.settings)
        self._gpu_count = count_gpus()

    def end_training(self) -> None:
        """End this node's part of the training job at once, without a call on the shared directory."""

    def _stall_limit_s(self, phase: str) -> float | None:
        """For how long progress in a row may stand still."""
        if phase not in {Phase.TRAIN_ROLLOUT.label, Phase.EVAL_ROLLOUT.label}:
            return self.settings.trainer.stall_timeout_s
        limit_s = self.settings.rollout.stall_timeout_s
        return None if limit_s is None else limit_s + self.settings.engine.start_timeout_s

    def check(self) -> None:
        """Raise what has ended the present row, if anything has."""
        self.check_self()
        end = self.ending(self.watch.verdict) if self.watch.verdict is not None else None
        if self.watch.fence.tripped and not isinstance(end, Ended):
            raise Fenced
        if end is not None:
            raise end
        self._say_whether_master_is_lost()

    def _say_whether_master_is_lost(self) -> None:
        """A worker says once that its master is lost, and that it is back."""
        lost = not self.is_master and (
            self.watch.silence.silent_s.get(MASTER, 0.0) >= self.settings.cluster.node_timeout_s
        )
        if lost and not self._master_is_lost:
            again = f"run --master ... --log-path {shlex.quote(str(self.run_dir.root))}"
            log.error("holding: %s is lost; there, the same command again: %s", self.say_rank(MASTER), again)
        if self._master_is_lost and not lost:
            log.info("rank %d is back", MASTER)
        self._master_is_lost = lost

    def check_still_master(self) -> None:
        """Ended (superseded) if another process has become the master."""
        newest, mine = self.watch.newest_record(), self.watch.incarnation
        since = newest is not None and newest.epoch > self.newest_epoch  # what was there at START is older
        replaced = newest is not None and since and newest.master_incarnation != mine
        if replaced or self.watch.board.highest_incarnation(MASTER) > mine:
            raise self.superseded()

    def settle(self) -> None:
        """Look once more, and raise what ends the row anyway: it goes before an error that it may explain."""
        with contextlib.suppress(SharedFsError):
            self.watch.look()
            if self.is_master and self.watch.current is None:
                self.check_still_master()
            self.check()

    def check_self(self) -> None:
        """Raise what this node itself has ended by: a signal, or an error of the watch."""
        if self.watch.signal is not None:
            name = signal.Signals(self.watch.signal).name
            stop = self.is_master and self.watch.signal == signal.SIGINT
            text = f"rank {self.rank} ({self.host}) was interrupted by {name}{self.where()}. {self.repair()}"
            raise Ended(Exit.INTERRUPTED, text, "stopped" if stop else "left")
        if self.watch.error is not None:
            raise self.watch.error

    def read(self, flag: Flag) -> Payload:
        """A flag's payload. It has been listed, but a mount may show its content a moment later."""
        deadline_s = time.monotonic() + FLAG_PATIENCE_S
        while True:
            try:
                return json.loads(files.read(self.run_dir.protocol / flag.name))
            except (FileNotFoundError, ValueError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def describe(self) -> dict[str, Any]:
        """What a heartbeat says."""
        return {
            "host": self.host,
            "pid": os.getpid(),
            "peer": self.peer.to_dict(),
            "address": self.address,
            "processes": self._processes,
            "gpu_count": self._gpu_count,
            "gpus": self.gpus.latest,
            **self.position.describe(),
        }

    def repair(self, rank: int | None = None) -> str:
        """The sentence that says how to go on; of `rank` alone, where the others hold for it."""
        if rank and self.settings.cluster.on_node_failure != "abort":
            return f"To bring it back, on that machine: {self.worker_command(rank)}"
        where = f"; on that machine: {self.worker_command(rank)}" if rank else ""
        return f"To resume, run the same commands again{where}"

    def worker_command(self, rank: int) -> str:
        """What a person types to start a worker."""
        return f"run --worker {rank} --log-path {shlex.quote(str(self.run_dir.root))}"

    def failure(self, error: BaseException) -> str:
        """One line: rank, host, phase, iteration, and the error."""
        return f"rank {self.rank} ({self.host}) failed{self.where()}: {error}"

    def where(self) -> str:
        """` in training, iteration 7`."""
        place = self.position
        return f" in {place.phase}, iteration {place.iteration}" if place.phase else f" while {place.state}"

    def say_missing(self, _board: Board) -> str:
        """Those that are waited for, as `say_rank`."""
        return "; ".join(self.say_rank(rank) for rank in self.position.waiting_for)

    def say_rank(self, rank: int) -> str:
        """`rank 2 (node-c; last seen in train_rollout, iteration 7, 37/128)`."""
        said = self.watch.said(rank)
        if not said:
            members = self.watch.current.members if self.watch.current else {}
            return f"rank {rank} ({members[rank].host if rank in members else 'never seen'})"
        progress = f", {said['done']}/{said['total']}" if said["total"] else ""
        phase = said["phase"] or said["state"]
        silent_s = self.watch.silence.silent_s.get(rank, 0.0)
        silent = f", silent for {silent_s:.0f} s" if silent_s >= self.settings.cluster.node_timeout_s else ""
        seen = f"last seen in {phase}, iteration {said['iteration']}{progress}{silent}"
        return f"rank {rank} ({said['host']}; {seen})"

    def ending(self, verdict: Verdict) -> Exception:
        """What a verdict does to this node, as the exception that ends its row."""
        event, rank = verdict.event, verdict.rank or 0
        if event in {Event.NEW_EPOCH, Event.RETURNED}:
            return EpochChanged()
        if event is Event.FINISHED:
            return Ended(Exit.DONE, "the run is finished")
        if event is Event.SUPERSEDED:
            return self.superseded()
        said = self.read_call(verdict.flag)
        if event is Event.TRAINER_FAILED:
            return TrainerFailed(f"the training job failed on another node: {said}")
        if event in {Event.FAILED, Event.STOPPED, Event.GAVE_UP}:
            codes = {Event.FAILED: Exit.FAILED, Event.STOPPED: Exit.INTERRUPTED, Event.GAVE_UP: Exit.LOST}
            return Ended(codes[event], said)
        why = f"no heartbeat for {self.watch.silence.silent_s.get(rank, 0.0):.0f} s"
        if event is Event.LEFT:
            why = said.partition(". To ")[0]
        if event is Event.STALLED:
            why = f"it beats, but has made no progress for {self.watch.standstill.still_s[rank]:.0f} s"
        text = f"{self.say_rank(rank)} is lost{self.where()}: {why}. {self.repair(rank)}"
        if self.is_master and self.settings.cluster.on_node_failure != "abort":
            return NodeLost(rank, text, event is Event.STALLED)
        return Ended(Exit.LOST, text, "gave_up" if self.is_master else "left")

    def superseded(self) -> Ended:
        """Exit 4, naming who has taken over."""
        newest = self.watch.newest_record()
        member = newest.members.get(self.rank) if newest else None
        highest = self.watch.board.highest_incarnation(self.rank)
        by = "a newer process"
        if highest > self.watch.incarnation:
            by = f"incarnation {highest} on {self.watch.said(self.rank).get('host', 'another host')}"
        elif self.is_master and newest:
            by = f"incarnation {newest.master_incarnation} on {newest.master_host}"
        elif member:
            by = f"incarnation {member.incarnation} on {member.host}"
        return Ended(Exit.SUPERSEDED, f"rank {self.rank} was taken over by {by}; this process ends")

    def read_call(self, flag: Flag | None) -> str:
        """What a node said with a call."""
        try:
            return str(self.read(flag)["text"]) if flag else ""
        except (FileNotFoundError, ValueError, KeyError):
            return f"rank {flag.rank} said {flag.kind}" if flag else ""
