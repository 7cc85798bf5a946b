"""A node: what it shares with the others, its place in an epoch, and `step`, one row of the table."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from filelock import BaseFileLock

from coordinator import network, outputs, shared_fs
from coordinator.board import Board
from coordinator.children import Children
from coordinator.engine_host import Adapters, EngineHost
from coordinator.epochs import MASTER, EpochRecord
from coordinator.fence import is_away
from coordinator.history import Past
from coordinator.inputs import base_model_dir
from coordinator.outcome import Ended, EpochChanged, Exit, TrainerFailed
from coordinator.outputs import Policy
from coordinator.phases import By, Phase, rows_of
from coordinator.retry import CACHED_S
from coordinator.run_dir import Flag
from coordinator.sinks import About, Sinks
from coordinator.standing import Payload, Position, Standing
from coordinator.start import Start
from coordinator.trainer_host import TrainerHost
from coordinator.watch import ENDED
from rollout.weights import policy_digest

log = logging.getLogger(__name__)

Act = Callable[["Node"], Payload | None]
Conclude = Callable[["Node", dict[int, Payload]], Payload | None]

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is not listed for so long raises it again: flags are not fsynced."""


class Node(Standing):
    """A node that has started: what it was told, its children, and the rows that it goes through."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.inputs = start.inputs
        self.iteration = 0
        self.resume_at = Phase.TRAIN_PLAN
        self.documents: dict[Phase, Payload] = {}
        """What the master's flags of this iteration said."""
        self.phase_s: dict[str, float] = {}
        self.work_s: dict[str, float] = {}
        self.children = Children()
        self.engine = EngineHost(self.children, self.run_dir, self.rank)
        self.trainer = TrainerHost(self.children, self.run_dir, self.rank)
        self.sinks = Sinks(About(start.run_id, start.run_dir.root, start.settings))
        self.lock: BaseFileLock | None = None
        self.lost: dict[int, tuple[int, int]] = {}
        """Ranks that are lost, with the (incarnation, counter) of the last beat that was seen of each."""
        self.verified: set[int] = set()
        """Checkpoints whose files this process has found whole."""
        self.past: Past = {}
        self._floor = start.incarnation_floor
        self._raised: dict[Flag, Payload] = {}
        self._base_digest = start.inputs.model_digest

    # ---- life

    def begin(self) -> None:
        """Take an incarnation and begin to beat; from here on signals end the node in order."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        shared_fs.make_directory(self.run_dir.logs(self.rank))
        if not self.is_master:  # its first beat must say where the master's side reaches it
            # A listing may show for so long what was there before.
            patience_s = max(self.settings.cluster.node_timeout_s, CACHED_S + 5.0)
            said = self.watch.wait(
                lambda _board: self.watch.said(MASTER) or None,
                self.check,
                lambda _board: "rank 0",
                patience_s,
            )
            if said is None:
                raise Ended(Exit.LOST, f"the master has gone while rank {self.rank} was starting")
            self.address = network.address_towards(self.peer, [network.Peer.from_dict(said["peer"])])
        self.watch.begin(self._floor, self.newest_epoch)

    def _on_signal(self, number: int, _frame: object) -> None:
        """End in order; at a second signal at once, since user code may hold us: the keeper does the rest."""
        if self.watch.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.watch.interrupt(number)

    def close(self) -> None:
        """End the children, then stop beating, with a last beat that says so."""
        self.children.close()
        self.sinks.close()
        self.position.state = ENDED
        self.watch.close()
        if self.lock is not None:
            self.lock.release()

    def enter(self, record: EpochRecord) -> None:
        """ENTER: nothing of the old epoch runs here any more; the master waits until all say so."""
        self.trainer.leave_epoch()
        self.record = record
        self.lost = {rank: mark for rank, mark in self.lost.items() if rank not in record.members}
        self.settings = self.inputs.localize(record.settings)
        self.watch.admit(record)
        self._raised.clear()
        self.iteration = 0
        self.position = Position("running")
        self._raise(Flag(record.epoch, 0, 0, self.rank, "enter"), {})
        if self.is_master:
            self._wait_flags(0, 0, "enter")

    def end_training(self) -> None:
        """As `Standing.end_training`; for any thread."""
        self.trainer.kill_now()

    def come_back(self) -> None:
        """Leave an epoch in which this node was without the shared directory, and wait until that answers.

        A worker comes back as a new incarnation, so that the master sees that it has left; a master claims
        the next epoch.
        """
        fence, cluster = self.watch.fence, self.settings.cluster
        if not fence.tripped:
            fence.trip("the shared directory fails")
        self.trainer.leave_epoch()
        self.position = Position("fenced")
        deadline_s = time.monotonic() + cluster.rejoin_timeout_s
        while not fence.wait_until_back(cluster.beat_s / 4):
            self.check_self()
            if time.monotonic() > deadline_s:
                silent = f"{self.run_dir.root} did not answer for {cluster.rejoin_timeout_s:.0f} s"
                raise Ended(Exit.LOST, f"{silent}. {self.repair()}")
        if not self.is_master:
            self.watch.leave()
            if not self.watch.heart.renew():
                raise self.superseded()
        fence.reset()

    def check_training(self) -> None:
        """As `check`, for the training row: its job cannot go on without a node that is lost."""
        self.check()
        epoch, silent_s = self.record.epoch, self.watch.silence.silent_s.get(MASTER, 0.0)
        if lost := self.watch.board.called(epoch, "lost"):
            raise TrainerFailed(f"the job lost a peer: {self.read_call(lost[0])}")
        if not self.is_master and silent_s >= self.settings.cluster.node_timeout_s:
            raise TrainerFailed(f"the job lost a peer: {self.say_rank(MASTER)}")

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch."""
        current = self.watch.current or self.watch.newest_record()
        if current is None or (self.watch.current is None and not self.is_master):
            return
        phase = Phase[self.position.phase.upper()] if self.position.phase else Phase.ITERATION_START
        flag = Flag(current.epoch, self.position.iteration, phase, self.rank, kind)
        self._raise(flag, {"text": text, "host": self.host, **more})

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
        self._base_digest = self._base_digest or policy_digest(shared_fs.checksums(directory))
        return Policy(0, directory, self._base_digest)

    @property
    def adapters(self) -> Adapters | None:
        """What checkpoints are adapters of, where they are."""
        rank = self.settings.trainer.lora.rank
        return Adapters(self.policy(0), rank) if rank else None

    def next_iteration(self, open_next: Callable[["Node"], int | None]) -> int | None:
        """The iteration to run next, None when the run is finished. The master decides; a worker reads it."""
        if self.is_master:
            self._take_in_returned()
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

    def _take_in_returned(self) -> None:
        """Under `shrink`: a rank that was left out and beats in this epoch comes in with this iteration."""
        board = self.watch.look()
        absent = set(range(self.settings.cluster.num_nodes)) - set(self.record.members)
        if any(rank in board.beats and board.beats[rank].epoch >= self.record.epoch for rank in absent):
            raise EpochChanged

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

    def persist(self, write: Callable[[], None]) -> None:
        """`write()`, again once the shared directory is back: what is finished must not be lost with it."""
        deadline_s = time.monotonic() + self.settings.cluster.rejoin_timeout_s
        while True:
            try:
                return write()
            except shared_fs.SharedFsError as error:
                if not is_away(error) or time.monotonic() > deadline_s:
                    raise
                self.check_self()
                time.sleep(self.settings.cluster.poll_max_s)

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

        return self.watch.wait(ready_or_raise_again, self.check, self.say_missing)

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
        said = {rank: self.read(Flag(self.record.epoch, iteration, phase, rank, "ok")) for rank in others}
        return {MASTER: own, **said}

    def _wait_master(self, iteration: int, phase: Phase) -> Payload:
        """The document of the master's flag."""
        flag = Flag(self.record.epoch, iteration, phase, MASTER, "ok")
        self.position.waiting_for = [MASTER]
        self._wait(lambda board: True if flag in board.flags else None)
        return self.read(flag)

    def _opened(self, board: Board, after: int) -> int | None:
        """The lowest iteration later than `after` that the master has opened in this epoch."""
        opening = (self.record.epoch, Phase.ITERATION_START, MASTER, "ok")
        opened = [
            flag.iteration
            for flag in board.flags
            if (flag.epoch, flag.phase, flag.rank, flag.kind) == opening and flag.iteration > after
        ]
        return min(opened, default=None)

    def _remove_flags_before(self, iteration: int) -> None:
        """Remove this node's flags of earlier iterations, up to the one before the last.

        A worker may still be reading the master's last flag of the iteration before; it has passed all
        older ones, or the master had not come here.
        """
        for flag in [flag for flag in self._raised if 0 < flag.iteration < iteration - 1]:
            shared_fs.remove(self.run_dir.protocol / flag.name)
            del self._raised[flag]
