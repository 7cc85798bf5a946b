"""Where a node stands: who it is, what it sees, and what it says of itself and of the others."""

import json
import os
import shlex
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from coordinator import network, shared_fs
from coordinator.board import Board
from coordinator.epochs import MASTER, EpochRecord, Event, Verdict
from coordinator.inputs import local_processes
from coordinator.outcome import Ended, EpochChanged, Exit, NodeLost, TrainerFailed
from coordinator.run_dir import Flag, RunDir
from coordinator.start import Start
from coordinator.watch import Watch

Payload = dict[str, Any]

FLAG_PATIENCE_S = 5.0
"""How long a flag that was listed may be missing or torn when it is read."""


@dataclass
class Position:
    """Where this node is, as its heartbeat says."""

    state: str = "starting"
    iteration: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    waiting_for: list[int] = field(default_factory=list[int])


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
        self.watch = Watch(self.run_dir, self.rank, self.settings.cluster, self.describe)
        self._processes = local_processes(self.settings)

    def check(self) -> None:
        """Raise what has ended the present row, if anything has."""
        if self.watch.signal is not None:
            name = signal.Signals(self.watch.signal).name
            stop = self.is_master and self.watch.signal == signal.SIGINT
            text = f"rank {self.rank} ({self.host}) was interrupted by {name}{self.where()}. {self.repair()}"
            raise Ended(Exit.INTERRUPTED, text, "stopped" if stop else "left")
        if self.watch.error is not None:
            raise self.watch.error
        if self.watch.verdict is not None:
            raise self.ending(self.watch.verdict)

    def read(self, flag: Flag) -> Payload:
        """A flag's payload. It has been listed, but a mount may show its content a moment later."""
        deadline_s = time.monotonic() + FLAG_PATIENCE_S
        while True:
            try:
                return json.loads(shared_fs.read(self.run_dir.protocol / flag.name))
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
            **vars(self.position),
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
        host = self.record.members[rank].host if rank in self.record.members else "?"
        said = self.watch.said(rank)
        if not said:
            return f"rank {rank} ({host})"
        progress = f", {said['done']}/{said['total']}" if said["total"] else ""
        phase = said["phase"] or said["state"]
        silent_s = self.watch.silence.silent_s.get(rank, 0.0)
        silent = f", silent for {silent_s:.0f} s" if silent_s >= self.settings.cluster.node_timeout_s else ""
        return f"rank {rank} ({host}; last seen in {phase}, iteration {said['iteration']}{progress}{silent})"

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
        silent_s = self.watch.silence.silent_s.get(rank, 0.0)
        why = said.partition(". To ")[0] if event is Event.LEFT else f"no heartbeat for {silent_s:.0f} s"
        text = f"{self.say_rank(rank)} is lost{self.where()}: {why}. {self.repair(rank)}"
        if self.is_master and self.settings.cluster.on_node_failure != "abort":
            return NodeLost(rank, text)
        return Ended(Exit.LOST, text, "gave_up" if self.is_master else "left")

    def superseded(self) -> Ended:
        """Exit 4, naming who has taken over."""
        newest = self.watch.newest_record()
        member = newest.members.get(self.rank) if newest else None
        by = "a newer process"
        if self.is_master and newest:
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
