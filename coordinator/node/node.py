"""A node: what it shares with the others, its place in an epoch, and `step`, one row of the table."""

import logging
import os
import signal
import time
from collections.abc import Callable

from filelock import BaseFileLock

from coordinator.directory import published
from coordinator.directory.layout import Flag
from coordinator.directory.published import Policy
from coordinator.directory.remover import Remover
from coordinator.journal.events import Events, about_this_process
from coordinator.journal.trackers import About, Sinks
from coordinator.machine import network
from coordinator.machine.children import Children
from coordinator.machine.engine import Adapters, EngineHost
from coordinator.machine.trainer import TrainerHost
from coordinator.node.flags import Flagging
from coordinator.node.inputs import base_model_dir
from coordinator.node.start import Start
from coordinator.node.verdicts import Payload, Position
from coordinator.protocol.exits import Ended, EpochChanged, Exit, TrainerFailed
from coordinator.protocol.fence import is_away
from coordinator.protocol.phases import By, Phase, rows_of
from coordinator.protocol.records import MASTER, EpochRecord
from coordinator.protocol.watch import ENDED
from rollout.engines.weights import policy_digest
from rollout.storage import files
from rollout.storage.retry import CACHED_S

log = logging.getLogger(__name__)

Act = Callable[["Node"], Payload | None]
Conclude = Callable[["Node", dict[int, Payload]], Payload | None]


class Node(Flagging):
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
        self.events = Events(self._place)
        self.engine = EngineHost(self.children, self.run_dir, self.rank, self.events.add)
        self.trainer = TrainerHost(self.children, self.run_dir, self.rank, self.events.add)
        self.sinks = Sinks(About(start.run_id, start.run_dir.root, start.settings))
        self.remover = Remover()
        self.lock: BaseFileLock | None = None
        self.lost: dict[int, tuple[int, int]] = {}
        """Ranks that are lost, with the (incarnation, counter) of the last beat that was seen of each."""
        self.verified: set[int] = set()
        """Checkpoints whose files this process has found whole."""
        self.past: dict[int, dict[int, float]] = {}
        self._floor = start.incarnation_floor
        self._base_digest = start.inputs.model_digest

    # ---- life

    def begin(self) -> None:
        """Take an incarnation and begin to beat; from here on signals end the node in order."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        files.make_directory(self.run_dir.logs(self.rank))
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
        files.make_directory(self.run_dir.events(self.rank).parent)  # older runs have none
        self.events.open(self.run_dir.events(self.rank))
        self.events.add("process", rank=self.rank, host=self.host, pid=os.getpid(), **about_this_process())

    def _place(self) -> tuple[int, int]:
        current = self.watch.current
        return self.watch.incarnation, current.epoch if current is not None else 0

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
        self.remover.close()
        self.position.state = ENDED
        self.watch.close()
        self.events.end()
        if self.lock is not None:
            self.lock.release()

    def enter(self, record: EpochRecord) -> None:
        """ENTER: nothing of the old epoch runs here any more; the master waits until all say so."""
        self.trainer.leave_epoch()
        self.record = record
        self.lost = {rank: mark for rank, mark in self.lost.items() if rank not in record.members}
        self.settings = self.inputs.localize(record.settings)
        self.watch.admit(record)
        self.forget_flags()
        self.iteration = 0
        self.position = Position("running")
        gpus = [gpu["name"] for gpu in self.gpus.latest]
        weight = record.members[self.rank].weight
        self.events.add("epoch", members=sorted(record.members), weight=weight, gpus=gpus)
        self.raise_flag(Flag(record.epoch, 0, 0, self.rank, "enter"), {})
        if self.is_master:
            self.wait_flags(0, 0, "enter")

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

    # ---- rows

    @property
    def header(self) -> Payload:
        """What the master said when it opened this iteration: resume_at, policy, policy_iteration."""
        return self.documents[Phase.ITERATION_START]

    def policy(self, iteration: int) -> Policy:
        """The policy that training of `iteration` made; 0: what the run started from, as it lies here."""
        if iteration > 0:
            return published.policy_of(self.run_dir, iteration)
        directory = base_model_dir(self.settings, self.run_dir)
        self._base_digest = self._base_digest or policy_digest(files.checksums(directory))
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
            iteration = self.wait_until(lambda board: self.opened(board, self.iteration))
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
        self.events.add("begin", it=iteration, row=phase.label)
        mine = self.is_master or by is By.ALL
        payload = (act(self) or {}) if mine else {}
        acted_s = time.monotonic()
        concluded_s = 0.0
        self.check()
        flag = Flag(self.record.epoch, iteration, phase, self.rank, "ok")
        if self.is_master:
            if by is By.ALL:
                self.wait_flags(iteration, phase)
                flags_up_s = time.monotonic()
                payload = (then(self, self.payloads(iteration, phase, payload)) or {}) if then else {}
                concluded_s = time.monotonic() - flags_up_s
            self.raise_flag(flag, payload)
        else:
            if mine:
                self.raise_flag(flag, payload)
            payload = self.wait_master(iteration, phase)
        self.documents[phase] = payload
        work_s = self.work_s[phase.label] = acted_s - started_s + concluded_s
        self.events.add(
            "end", it=iteration, row=phase.label, work_s=round(work_s, 4), then_s=round(concluded_s, 4)
        )
        self.phase_s[phase.label] = time.monotonic() - started_s
        if phase is Phase.ITERATION_START:
            self.resume_at = Phase(payload["resume_at"])
            self.remove_flags_before(iteration)

    def persist(self, write: Callable[[], None]) -> None:
        """`write()`, again once the shared directory is back: what is finished must not be lost with it."""
        deadline_s = time.monotonic() + self.settings.cluster.rejoin_timeout_s
        while True:
            try:
                return write()
            except files.SharedFsError as error:
                if not is_away(error) or time.monotonic() > deadline_s:
                    raise
                self.check_self()
                time.sleep(self.settings.cluster.poll_max_s)

    def progress(self, done: int, total: int, tokens: int = 0) -> None:
        """What the next heartbeat says of the work in this row; `tokens`: how many are generated."""
        self.position.reach(done, total, tokens)
