"""A node: what it shares with the others, its place in an epoch, and `step`, one row of the table."""

import json
import logging
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from filelock import BaseFileLock

from coordinator import network, outputs, shared_fs
from coordinator.board import Board
from coordinator.children import Children
from coordinator.engine_host import EngineHost
from coordinator.epochs import MASTER, EpochRecord, Event, Verdict
from coordinator.outcome import Ended, EpochChanged, Exit, TrainerFailed
from coordinator.outputs import Policy
from coordinator.phases import By, Phase, rows_of
from coordinator.run_dir import Flag, RunDir
from coordinator.start import Start, base_model_dir, local_processes
from coordinator.trainer_host import TrainerHost
from coordinator.watch import ENDED, Watch
from rollout.weights import file_checksums, policy_digest

log = logging.getLogger(__name__)

Payload = dict[str, Any]
Act = Callable[["Node"], Payload | None]
Conclude = Callable[["Node", dict[int, Payload]], Payload | None]

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is not listed for so long raises it again: flags are not fsynced."""


@dataclass
class Position:
    """Where this node is, as its heartbeat says."""

    state: str = "starting"
    iteration: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    waiting_for: list[int] = field(default_factory=list[int])


class Node:
    """A node that has started: what it was told, its children, and its place in the present epoch."""

    def __init__(self, start: Start) -> None:
        self.rank = start.rank
        self.is_master = start.rank == MASTER
        self.run_dir: RunDir = start.run_dir
        self.run_id = start.run_id
        self.settings = start.settings
        self.inputs = start.inputs
        self.newest_epoch = start.newest_epoch
        self.host = socket.gethostname()
        self.peer = network.this_peer()
        self.address = network.LOOPBACK
        self.position = Position()
        self.iteration = 0
        self.resume_at = Phase.TRAIN_PLAN
        self.record: EpochRecord
        self.documents: dict[Phase, Payload] = {}
        """What the master's flags of this iteration said."""
        self.phase_s: dict[str, float] = {}
        self.work_s: dict[str, float] = {}
        self.children = Children()
        self.engine = EngineHost(self.children, self.run_dir, self.rank)
        self.trainer = TrainerHost(self.children, self.run_dir, self.rank)
        self.watch = Watch(self.run_dir, self.rank, self.settings.cluster, self.describe)
        self.lock: BaseFileLock | None = None
        self._floor = start.incarnation_floor
        self._processes = local_processes(self.settings)
        self._raised: dict[Flag, Payload] = {}
        self._base_digest = start.inputs.model_digest

    # ---- life

    def begin(self) -> None:
        """Take an incarnation and begin to beat; from here on signals end the node in order."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: self.watch.interrupt(received))
        shared_fs.make_directory(self.run_dir.logs(self.rank))
        if not self.is_master:  # its first beat must say where the master's side reaches it
            master = network.Peer.from_dict(self.watch.said(MASTER)["peer"])
            self.address = network.address_towards(self.peer, [master])
        self.watch.begin(self._floor, self.newest_epoch)

    def close(self) -> None:
        """End the children, then stop beating, with a last beat that says so."""
        self.children.close()
        self.position.state = ENDED
        self.watch.close()
        if self.lock is not None:
            self.lock.release()

    def enter(self, record: EpochRecord) -> None:
        """ENTER: nothing of the old epoch runs here any more; the master waits until all say so."""
        self.trainer.leave_epoch()
        self.record = record
        self.settings = self.inputs.localize(record.settings)
        self.watch.admit(record)
        self._raised.clear()
        self.iteration = 0
        self.position = Position("running")
        self._raise(Flag(record.epoch, 0, 0, self.rank, "enter"), {})
        if self.is_master:
            self._wait_flags(0, 0, "enter")

    def check(self) -> None:
        """Raise what has ended the present row, if anything has."""
        if self.watch.signal is not None:
            name = signal.Signals(self.watch.signal).name
            stop = self.is_master and self.watch.signal == signal.SIGINT
            text = f"rank {self.rank} ({self.host}) was interrupted by {name}{self._where()}. {self.repair()}"
            raise Ended(Exit.INTERRUPTED, text, "stopped" if stop else "left")
        if self.watch.error is not None:
            raise self.watch.error
        if self.watch.verdict is not None:
            raise self.ending(self.watch.verdict)

    def tell(self, kind: str, text: str) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch."""
        current = self.watch.current or self.watch.newest_record()
        if current is None or (self.watch.current is None and not self.is_master):
            return
        phase = Phase[self.position.phase.upper()] if self.position.phase else Phase.ITERATION_START
        flag = Flag(current.epoch, self.position.iteration, phase, self.rank, kind)
        self._raise(flag, {"text": text, "host": self.host})

    # ---- rows

    @property
    def header(self) -> Payload:
        """What the master said when it opened this iteration: resume_at, policy, policy_iteration."""
        return self.documents[Phase.ITERATION_START]

    def policy(self, iteration: int) -> Policy:
        """The policy that training of `iteration` made; 0: what the run started from, as it lies here."""
        if iteration > 0:
            return outputs.policy_of(self.run_dir, iteration)
        directory = base_model_dir(self.settings, self.run_dir)
        self._base_digest = self._base_digest or policy_digest(file_checksums(directory))
        return Policy(0, directory, self._base_digest)

    def next_iteration(self, open_next: Callable[["Node"], int | None]) -> int | None:
        """The iteration to run next, None when the run is finished. The master decides; a worker reads it."""
        if self.is_master:
            iteration = open_next(self)
            if iteration is None:
                return None
        else:
            self.position = Position("running", self.iteration, Phase.ITERATION_START.label)
            self.position.waiting_for = [MASTER]
            iteration = self._wait(lambda board: self._opened(board, self.iteration))
        self.iteration = iteration
        self.documents, self.phase_s, self.work_s = {}, {}, {}
        return iteration

    def step(
        self, iteration: int, phase: Phase, act: Act, by: By = By.ALL, then: Conclude | None = None
    ) -> None:
        """One row: act if it is ours, raise our flag, wait for the master's: its document is the result.

        The master acts, waits for the flags of all (unless it acts alone), concludes with `then` from their
        payloads, and raises its own flag last.
        """
        if Phase.ITERATION_START < phase < self.resume_at:
            return
        if phase not in rows_of(self.settings.rl_phase, self.settings.rollout_split):
            return
        self.position = Position("running", iteration, phase.label)
        self.check()
        started_s = time.monotonic()
        mine = self.is_master or by is By.ALL
        payload = (act(self) or {}) if mine else {}
        acted_s = time.monotonic()
        self.check()
        flag = Flag(self.record.epoch, iteration, phase, self.rank, "ok")
        if self.is_master:
            if by is By.ALL:
                self._wait_flags(iteration, phase)
                payload = (then(self, self._payloads(iteration, phase, payload)) or {}) if then else {}
            self._raise(flag, payload)
        else:
            if mine:
                self._raise(flag, payload)
            payload = self._wait_master(iteration, phase)
        self.documents[phase] = payload
        self.work_s[phase.label] = acted_s - started_s
        self.phase_s[phase.label] = time.monotonic() - started_s
        if phase is Phase.ITERATION_START:
            self.resume_at = Phase(payload["resume_at"])
            self._remove_flags_before(iteration)

    def progress(self, done: int, total: int) -> None:
        """What the next heartbeat says of the work in this row."""
        self.position.done, self.position.total = done, total

    # ---- flags

    def _raise(self, flag: Flag, payload: Payload) -> None:
        shared_fs.publish(self.run_dir.protocol / flag.name, json.dumps(payload).encode(), durable=False)
        self._raised[flag] = payload

    def _wait(self, ready: Callable[[Board], Any]) -> Any:
        started_s = time.monotonic()

        def ready_or_raise_again(board: Board) -> Any:
            result = ready(board)
            if result is None and time.monotonic() - started_s > RAISE_AGAIN_S:
                for flag in self._raised.keys() - board.flags:
                    self._raise(flag, self._raised[flag])
            return result

        return self.watch.wait(ready_or_raise_again, self.check, self._say_missing)

    def _wait_flags(self, iteration: int, phase: int, kind: str = "ok") -> None:
        members = set(self.record.members) - {MASTER}

        def all_up(board: Board) -> bool | None:
            self.position.waiting_for = sorted(
                members - board.flagged(self.record.epoch, iteration, phase, kind)
            )
            return None if self.position.waiting_for else True

        self._wait(all_up)

    def _payloads(self, iteration: int, phase: Phase, own: Payload) -> dict[int, Payload]:
        others = sorted(set(self.record.members) - {MASTER})
        said = {rank: self._read(Flag(self.record.epoch, iteration, phase, rank, "ok")) for rank in others}
        return {MASTER: own, **said}

    def _wait_master(self, iteration: int, phase: Phase) -> Payload:
        """The document of the master's flag."""
        flag = Flag(self.record.epoch, iteration, phase, MASTER, "ok")
        self.position.waiting_for = [MASTER]
        self._wait(lambda board: True if flag in board.flags else None)
        return self._read(flag)

    def _opened(self, board: Board, after: int) -> int | None:
        """The lowest iteration later than `after` that the master has opened in this epoch."""
        opening = (self.record.epoch, Phase.ITERATION_START, MASTER, "ok")
        opened = [
            flag.iteration
            for flag in board.flags
            if (flag.epoch, flag.phase, flag.rank, flag.kind) == opening and flag.iteration > after
        ]
        return min(opened, default=None)

    def _read(self, flag: Flag) -> Payload:
        return json.loads(shared_fs.read(self.run_dir.protocol / flag.name))

    def _remove_flags_before(self, iteration: int) -> None:
        """Remove this node's flags of earlier iterations, up to the one before the last.

        A worker may still be reading the master's last flag of the iteration before; it has passed all
        older ones, or the master had not come here.
        """
        for flag in [flag for flag in self._raised if 0 < flag.iteration < iteration - 1]:
            shared_fs.remove(self.run_dir.protocol / flag.name)
            del self._raised[flag]

    # ---- words

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
        """The sentence that says how to go on."""
        where = f"; on that machine: {self.worker_command(rank)}" if rank else ""
        return f"To resume, run the same commands again{where}"

    def worker_command(self, rank: int) -> str:
        """What a person types to start a worker."""
        return f"run --worker {rank} --log-path {shlex.quote(str(self.run_dir.root))}"

    def failure(self, error: BaseException) -> str:
        """One line: rank, host, phase, iteration, and the error."""
        return f"rank {self.rank} ({self.host}) failed{self._where()}: {error}"

    def _where(self) -> str:
        place = self.position
        return f" in {place.phase}, iteration {place.iteration}" if place.phase else f" while {place.state}"

    def _say_missing(self, board: Board) -> str:
        return "; ".join(self._say_rank(rank) for rank in self.position.waiting_for)

    def _say_rank(self, rank: int) -> str:
        """`rank 2 (node-c; last seen in train_rollout, iteration 7, 37/128)`."""
        host = self.record.members[rank].host if rank in self.record.members else "?"
        said = self.watch.said(rank)
        if not said:
            return f"rank {rank} ({host})"
        progress = f", {said['done']}/{said['total']}" if said["total"] else ""
        phase = said["phase"] or said["state"]
        return f"rank {rank} ({host}; last seen in {phase}, iteration {said['iteration']}{progress})"

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
        why = said if event is Event.LEFT else f"no heartbeat for {silent_s:.0f} s"
        text = f"{self._say_rank(rank)} is lost{self._where()}: {why}. {self.repair(rank)}"
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
            return str(self._read(flag)["text"]) if flag else ""
        except (FileNotFoundError, ValueError, KeyError):
            return f"rank {flag.rank} said {flag.kind}" if flag else ""
