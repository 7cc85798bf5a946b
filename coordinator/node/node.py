"""A node: its parts, and its life from the first heartbeat to the last."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from filelock import BaseFileLock

from coordinator.collector.host import CollectorHost
from coordinator.collector.listener import Stop
from coordinator.directory import claims
from coordinator.directory.background import Background
from coordinator.directory.history import History
from coordinator.directory.layout import MASTER, Kind, RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.published import half_pictures
from coordinator.directory.remover import Remover
from coordinator.directory.sweeper import Sweeper
from coordinator.journal.events import Events, about_this_process, first_begin_s
from coordinator.journal.tracker_feed import RunFacts, Sinks
from coordinator.machine.children import Children
from coordinator.machine.engine import EngineHost
from coordinator.machine.gpus import GpuSampler
from coordinator.machine.host_lock import hold_for_process, name_of_run
from coordinator.machine.signals import Signals
from coordinator.machine.store import Store
from coordinator.machine.trainer import TrainerHost
from coordinator.node.directory_outage import DirectoryOutage
from coordinator.node.flags import Flags, Payload
from coordinator.node.gathering import Gathering
from coordinator.node.guests_present import Guests
from coordinator.node.hung_directory_calls import end_children_if_calls_hang
from coordinator.node.identity import Identity
from coordinator.node.iteration import Iteration
from coordinator.node.messages import Messages
from coordinator.node.other_crew import OtherCrew
from coordinator.node.pending import Pending
from coordinator.node.phase_endings import PhaseEndings
from coordinator.node.policies import Policies
from coordinator.node.position import Position
from coordinator.node.prefetch import Prefetch
from coordinator.protocol.exits import EpochChanged, Exit, NodeEnded
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.watch import ENDED, Watch
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import difference
from coordinator.start.start import NodeStart
from rollout.storage import files
from rollout.storage.hashing import CountBytes

log = logging.getLogger(__name__)


class Node:
    """A node that has started. Each of its parts has one task; none of them knows the node."""

    def __init__(self, start: NodeStart) -> None:
        self.identity = Identity.from_start(start)
        self.position = Position(start.run_dir.names, lambda: self.engine.is_starting)
        run_dir, rank, settings = self.run_dir, self.rank, start.settings
        # ---- this machine
        self.children = Children()
        self.children.group = settings.cluster.group_of(run_dir.machine(rank))
        self.events = Events()
        self.engine = EngineHost(self.children, run_dir, rank, self.events.add)
        self.trainer = TrainerHost(self.children, run_dir, rank, self.events.add)
        self.collector = CollectorHost(self.children, run_dir, rank, self.events.add)
        self.store = Store(settings.cluster.local_dir)
        self.gpus = GpuSampler(settings.cluster.beat_interval_s)
        self.sinks = Sinks(RunFacts(start.run_id, run_dir.root, settings))
        self.remover = Remover()
        self.sweeper = Sweeper()
        self.verifier = Background("verifier")
        self.ahead = Background("ahead")
        # ---- the others
        self.watch = Watch(run_dir, rank, settings, self._describe, self.trainer.kill_now, start.run_id)
        self.signals = Signals(self._interrupt)
        self.messages = Messages(self.identity, self.position, self.watch)
        self.phase_endings = PhaseEndings(self.identity, self.position, self.watch, self.messages)
        self.flags = Flags(
            self.identity, self.position, self.watch, self.check, self.messages.missing,
            self.sweeper.sweep, start.left_behind,
        )  # fmt: skip
        waiting = (self.identity, self.position, self.watch, self.messages, self.phase_endings)
        self.gathering = Gathering(*waiting, self._describe)
        self.pending, self.outage = Pending(*waiting), DirectoryOutage(*waiting)
        self.other_crew = None if run_dir.crew == "main" else OtherCrew(self.identity)
        self.watch.hear_others = self._hear_other_crew
        self.watch.look_for_run = self.outage.look_for_run
        self.announced: int | None = None
        """The last iteration whose line was logged here, where another crew writes them."""
        self.idle_s = 0.0
        """How long the crew waited for the other one before the present iteration."""
        self.guests = Guests(run_dir, self.watch)
        self.promised: dict[int, Payload] = {}
        """By rank, what the nodes of this epoch have said of what they have in flight."""
        # ---- what is published
        self.policies = Policies(self.identity, self.store)
        self.prefetch = Prefetch(run_dir, self.policies)
        kinds: tuple[Kind, ...] = ("train", "eval")
        self.histories = {kind: History(run_dir, kind) for kind in kinds}
        checkpoints = settings.checkpoints
        self.finished = FinishedIterations(
            run_dir, keeps_scores=checkpoints.keep_best > 0, by=checkpoints.best_by
        )
        self._lock: BaseFileLock | None = None
        self._begun: Iteration | None = None
        """The newest iteration."""

    @property
    def run_dir(self) -> RunDir:
        """The shared directory of the run."""
        return self.identity.run_dir

    @property
    def rank(self) -> int:
        """This node's rank."""
        return self.identity.rank

    @property
    def is_master(self) -> bool:
        """Whether this node decides."""
        return self.identity.is_master

    @property
    def settings(self) -> RunSettings:
        """The settings of the epoch that the node is in."""
        return self.identity.settings

    @property
    def record(self) -> EpochRecord:
        """The record of the epoch that the node is in."""
        return self.watch.record

    def check(self) -> None:
        """Raise what has ended the present phase, if anything has."""
        self.phase_endings.check()

    def reading(self) -> CountBytes:
        """Return a function to call with the size of each piece that this phase reads: that counts as
        progress, and raises what has ended the phase. For any thread.
        """
        count = self.position.count_bytes()

        def count_bytes(size: int) -> None:
            count(size)
            self.check()

        return count_bytes

    def _hear_other_crew(self) -> None:
        """Hear whether the other crew has ended. A worker hears it from its master, while it
        has one.
        """
        silent_s = self.watch.silence.silent_s.get(MASTER, 0.0)
        hears = self.is_master or silent_s >= self.settings.cluster.node_timeout_s
        if self.other_crew is not None and hears:
            self.other_crew.hear()

    # ---- life

    def begin(self) -> None:
        """Take an incarnation and begin to beat; from here on signals end the node in order."""
        self.signals.begin(self.children.spool / "signals")
        files.make_directory(self.run_dir.logs(self.rank))
        if not self.is_master:
            self.pending.find_address()
        self.watch.begin(self.identity.incarnation_floor, self.identity.newest_epoch)
        self.events.open(self.run_dir.events(self.rank), self._place)
        process_facts = {"rank": self.rank, "host": self.identity.host, "pid": os.getpid()}
        self.events.add("process", **process_facts, **about_this_process())

    def _describe(self) -> dict[str, object]:
        """Return the content of a heartbeat."""
        return {**self.identity.describe(), "gpus": self.gpus.latest, **self.position.describe()}

    def _place(self) -> tuple[int, int]:
        current = self.watch.current
        return self.watch.incarnation, current.epoch if current is not None else 0

    def phase_stop(self, _iteration: int, _phase: Phase) -> Stop:
        """Return the Stop that is set when a phase has ended for this node."""
        return self.watch.stop

    def first_part(self) -> int:
        """Return the number behind which the parts of a share are numbered."""
        return 0

    def leave_claim(self, path: Path) -> None:
        """Take a file of a phase's claims: it is removed when the phase is over."""
        self.flags.leave([path])

    def _interrupt(self, number: int) -> None:
        """End at a signal; called in a thread of its own."""
        self.watch.interrupt(number)
        end_children_if_calls_hang(self.children, partial(self.messages.hangs, number))

    def enter(self, record: EpochRecord) -> None:
        """Enter an epoch: nothing of the old one runs here any more; the master waits until all say so."""
        self.trainer.leave_epoch()
        lost = self.gathering.lost
        self.gathering.lost = {rank: mark for rank, mark in lost.items() if rank not in record.members}
        self.identity.adopt(record.settings)
        self._take_over_group()
        self.watch.admit(record, self.settings)
        self.children.leave_word(*self.flags.last_word())
        self.flags.forget()
        self.position.move("running")
        if not self.is_master:
            self.take_over_inputs(record)
        gpus = [gpu["name"] for gpu in self.gpus.latest]
        weight = record.members[self.rank].weight
        self.events.add("epoch", members=sorted(record.members), weight=weight, gpus=gpus)
        in_flight = self.collector.in_flight
        promise = {} if in_flight is None else {"key": in_flight.key, "slots": in_flight.slots}
        self.flags.enter(promise)
        if self.is_master:
            self.promised = self.flags.payloads(self.flags.wait_members(0, 0), promise)
            self.flags.leave(claims.left_over(self.run_dir, record.epoch))
            self.flags.leave(half_pictures(self.run_dir))
        self.hold_rank()

    def hold_rank(self) -> None:
        """Be the only process of this rank on this machine; an older one ends."""
        if self._lock is None:
            run = name_of_run(self.run_dir.run_json, self.identity.run_id)
            crew = "" if self.run_dir.crew == "main" else f".{self.run_dir.crew}"
            self._lock = hold_for_process(f"{run}{crew}.rank{self.rank}", self.identity.name, self.check)

    def _take_over_group(self) -> None:
        """End an engine that runs as the group of this node was before: its settings may be others now."""
        group = self.settings.cluster.group_of(self.run_dir.machine(self.rank))
        if group != self.children.group:
            self.engine.end()
        self.children.group = group

    def take_over_inputs(self, record: EpochRecord) -> None:
        """Load what the record's settings name: the master may have been started again with others."""
        me = self.identity
        try:
            me.inputs = me.inputs.renewed(self.settings, record.inputs)
            problem = difference(me.inputs.codes(), record.inputs, record.master_host)
        except SettingsError as error:
            problem = str(error)
        if problem is not None:
            raise NodeEnded(Exit.FAILED, self.messages.failure(SettingsError(problem)), "failed")

    def follow(self, record: EpochRecord) -> None:
        """Take over the settings of the run's master, which leads another crew, in a new epoch."""
        self.identity.adopt(record.settings)
        self.take_over_inputs(record)
        log.info("the master has started again with other settings: going on in a new epoch")
        raise EpochChanged

    def come_back(self) -> None:
        """Leave an epoch in which this node was without the shared directory, and wait until that answers."""
        fence = self.watch.fence
        if not fence.tripped:
            fence.trip("the shared directory fails")
        self.trainer.leave_epoch()
        self.collector.drop()
        self.outage.wait_out()

    def close(self) -> None:
        """End the children, then stop beating, with a last beat that says so."""
        self.children.close()
        self.prefetch.close()
        self.store.close()
        self.sinks.close()
        self.remover.close()
        self.sweeper.close()
        self.position.end(ENDED)
        self.watch.close()
        self.events.end()
        if self._lock is not None:
            self._lock.release()

    # ---- phases

    def next_iteration(self, last: int, open_next: Callable[["Node"], int | None]) -> Iteration | None:
        """Return the iteration to run after `last` (0: the first one of this epoch), None when none is left.

        The master decides by `open_next`; a worker waits for what it opens.
        """
        if self.is_master:
            if last:
                self.gathering.settle()
            if self.gathering.returned():
                raise EpochChanged
            number = open_next(self)
            if number is not None and number <= last:  # its flags of this epoch are up already
                raise EpochChanged
        else:
            self.position.move("running", last, Phase.ITERATION_START.label, [MASTER])
            number = self.flags.wait_opened(last)
        if number is None:
            return None
        begun = self._begun
        if begun is not None and begun.number == number:
            self._begun = begun.again()
        else:
            earlier_s = None
            if self.is_master and begun is None:  # a process before this one may have begun it
                earlier_s = first_begin_s(self.run_dir.events(self.rank), self.identity.host, number)
            self._begun = Iteration(number, time.monotonic() if earlier_s is None else earlier_s)
        return self._begun
