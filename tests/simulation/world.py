"""The machines of one run: nodes are started, killed, stopped, and started again until the run has ended."""

import itertools
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator import main
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import guest_loop, table
from coordinator.phases.guest_node import GuestNode
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import Placement
from coordinator.settings.placement import Crew
from coordinator.start.request import StartRequest
from coordinator.start.start import NodeStart
from tests.simulation import patches
from tests.simulation.children import Machines
from tests.simulation.disk import Disk
from tests.simulation.scheduler import Process, Scheduler

OPERATOR_S = 5.0
"""How often somebody looks whether a node has to be started again."""
PATIENCE_S = 600.0
"""The run must end within this time after the last fault."""

SETTINGS: dict[str, Any] = {
    "iterations": 2,
    "rollout.tasks_per_iteration": 6,
    "rollout.samples_per_task": 2,
    "rollout.concurrency": 4,
    "rollout.part_interval_s": 1.0,
    "rollout.reward": "tests.simulation.engines:reward",
    "eval.max_tasks": 2,
    "trainer.processes_per_node": 1,
    "trainer.max_attempts": 20,
    "engine.max_restarts": 20,
    "cluster.rejoin_timeout_s": 3600.0,
    "checkpoints.keep_last": 2,
    "checkpoints.head_start": True,
}


@dataclass(eq=False)
class NodeProcess(Process):
    """A process of `run`."""

    rank: int = 0
    """In its crew."""
    machine: int = 0
    """Its machine among all of the run."""
    node: Node | None = None
    """Once START is over."""
    code: int | None = None
    """Its exit code; none if it was killed."""
    place: tuple[int, int] = (0, 0)
    """The farthest (iteration, phase) that it has been in."""

    @property
    def lives(self) -> bool:
        return self.code is None and not self.killed

    @property
    def incarnation(self) -> int:
        return self.node.watch.incarnation if self.node is not None else 0

    def become(self, start: NodeStart) -> Node:
        """In place of `Node`: makes the node of this process."""
        self.node = GuestNode(start) if start.rank >= GUESTS else Node(start)
        return self.node

    def follow(
        self, where: Callable[[], str], doing: Callable[[], object], elsewhere: Callable[[], str]
    ) -> None:
        """In place of the prefix of its log lines."""

    doing = remind = None

    def keep(self, directory: Path, events: Any) -> None:
        """In place of its log file."""

    def close(self) -> None:
        """In place of its log file's end."""


class World:
    """The machines of one run, and everything that has been started on them."""

    def __init__(
        self, root: Path, nodes: int, seed: int, settings: Mapping[str, Any], trainers: int = 0
    ) -> None:
        """`trainers`: how many of the nodes are a crew of their own, which trains."""
        self.scheduler = Scheduler(seed)
        self.nodes = nodes
        self.generators = nodes - trainers
        self.run_dir = RunDir(root / "run")
        self.disk = Disk(self.scheduler, self.run_dir.root)
        self.machines = Machines(self.scheduler, self.disk, root / "local")
        self.settings = {**SETTINGS, "cluster.num_nodes": nodes, **settings}
        self.processes: list[NodeProcess] = []
        self.said: list[str] = []
        self.quiet_since_s = self.scheduler.now_s
        """When the last fault was over."""
        self.allowed = {Exit.DONE, Exit.SUPERSEDED}
        """Exit codes that processes may end with."""
        self.guests = 0
        """Machines that come as guests."""
        self.patches: list[Callable[[pytest.MonkeyPatch], None]] = []
        """Further ones, for the time of the run."""
        self._numbers = itertools.count(1)
        self._model = root / "model"
        self._model.mkdir(parents=True)
        (self._model / "model.safetensors").write_bytes(b"weights to start from")
        (self._model / "config.json").write_text("{}")

    # ---- what happens to nodes

    def crew_of(self, machine: int) -> tuple[Crew, int]:
        """The crew of a machine, and its rank there."""
        if self.generators == self.nodes:
            return "main", machine
        if machine < self.generators:
            return "rollout", machine
        return "train", machine - self.generators

    def _place_devices(self) -> None:
        """Say what the machines would say of their devices, in the process that starts the nodes."""
        if self.place:
            for machine in range(self.nodes):
                placement_records.publish_devices(self.run_dir.root, machine, f"host-{machine}", 1)
            placement_records.publish_placement(self.run_dir.root, Placement(self.nodes, self.place))

    @property
    def place(self) -> tuple[str, ...]:
        """How the devices are placed; each machine has one."""
        rollout, train = f"rollout=0-{self.generators - 1}", f"train={self.generators}-{self.nodes - 1}"
        return (rollout, train) if self.generators < self.nodes else ()

    def start(self, machine: int) -> None:
        """Start a process of a machine."""
        number = next(self._numbers)
        offset_s = self.scheduler.random.uniform(0.0, 1e6)
        if machine >= GUESTS:
            process = NodeProcess(f"guest {machine} ({number})", f"host-{machine}-{number}", offset_s,
                                  rank=machine, machine=machine)  # fmt: skip
            self.processes.append(process)
            self.scheduler.spawn(process, partial(self._visit, process))
            return
        crew, rank = self.crew_of(machine)
        name = f"{'rank' if crew == 'main' else crew} {rank} ({number})"
        process = NodeProcess(name, f"host-{machine}-{number}", offset_s, rank=rank, machine=machine)
        self.processes.append(process)
        self.scheduler.spawn(process, partial(self._live, process))

    def given(self, process: NodeProcess) -> Mapping[str, Any]:
        """The settings that are typed at the start of a process."""
        return {**self.settings, "cluster.place": self.place} if process.machine == 0 else {}

    def _live(self, process: NodeProcess) -> None:
        crew, _ = self.crew_of(process.machine)
        request = StartRequest(self.run_dir.root, process.machine, self.given(process), crew=crew)
        prefix: Any = process
        process.code = main.run_node(request, prefix)
        self.tell(f"{process.name} ends with {process.code}")
        if process.code not in self.allowed:
            self.scheduler.violate(f"{process.name} ended with exit code {process.code}")

    def _visit(self, process: NodeProcess) -> None:
        """The life of a guest: no code of its own is a fault of the run."""
        request = StartRequest(self.run_dir.root, guest=f"guest {process.machine}")
        prefix: Any = process
        process.code = main.run_guest(request, prefix)
        self.tell(f"{process.name} ends with {process.code}")
        if process.code not in {Exit.DONE, Exit.SUPERSEDED, Exit.INTERRUPTED, Exit.LOST}:
            self.scheduler.violate(f"{process.name} ended with exit code {process.code}")

    def kill(self, process: NodeProcess) -> None:
        """SIGKILL; its children follow."""
        self.tell(f"{process.name} is killed")
        self.scheduler.kill(process)
        self.machines.orphan(process)

    def pause(self, process: NodeProcess, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while; its children go on."""
        self.tell(f"{process.name} is stopped for {seconds:.1f} s")
        process.paused_until_s = max(process.paused_until_s, self.scheduler.now_s + seconds)
        self.disturb(seconds)

    def freeze(self, host: str, seconds: float) -> None:
        """The directory does not answer for a while, on this host or (disk.ALL) on all."""
        self.tell(f"the mount of {host or 'all hosts'} hangs for {seconds:.1f} s")
        until_s = self.scheduler.now_s + seconds
        self.disk.frozen_until_s[host] = max(until_s, self.disk.frozen_until_s.get(host, 0.0))
        self.disturb(seconds)

    def interrupt(self, process: NodeProcess, number: int = signal.SIGTERM) -> None:
        """A signal that a node ends at, in order; before that, it is as good as killed."""
        if process.node is None:
            self.kill(process)
            return
        self.tell(f"{process.name} gets signal {number}")
        self.allowed |= {Exit.INTERRUPTED}
        process.node.watch.interrupt(number)

    def disturb(self, seconds: float) -> None:
        """A fault lasts so long from now on."""
        self.quiet_since_s = max(self.quiet_since_s, self.scheduler.now_s + seconds)

    def living(self, machine: int) -> list[NodeProcess]:
        return [process for process in self.processes if process.machine == machine and process.lives]

    def newest(self, machine: int) -> NodeProcess | None:
        """The process of a machine that was started last and still lives."""
        return max(self.living(machine), key=self.processes.index, default=None)

    def has_ended(self, machine: int) -> bool:
        """Whether the run is over for a machine: nobody has to start it again."""
        mine = [process for process in self.processes if process.machine == machine]
        return any(process.code == Exit.DONE for process in mine) and not self.living(machine)

    def start_twin(self, machine: int) -> None:
        """Another process of a machine, whether one lives or not, unless the run is over for it."""
        if not self.has_ended(machine):
            self.start(machine)

    def start_again(self, machine: int) -> None:
        """What the operator does for a machine that has no process."""
        if not self.living(machine) and not self.has_ended(machine):
            self.start(machine)

    # ---- the run

    def run(self, faults_are_over: Callable[[], bool]) -> None:
        """Until every rank has ended and every thread is gone; `scheduler.violation` says what was wrong."""

        def operate() -> None:
            now_s = self.scheduler.now_s
            self.quiet_since_s = now_s if not faults_are_over() else self.quiet_since_s
            if all(self.has_ended(machine) for machine in range(self.nodes)):
                self.scheduler.end()
                return
            if now_s > self.quiet_since_s + PATIENCE_S:
                self.scheduler.violate(f"the run does not end: {self.describe()}")
            if now_s > self.quiet_since_s:
                for machine in range(self.nodes):
                    self.start_again(machine)
            self.scheduler.at(now_s + OPERATOR_S, operate)

        self._place_devices()
        for machine in range(self.nodes):
            delay_s = self.scheduler.random.uniform(0.0, 2.0)
            self.scheduler.at(self.scheduler.now_s + delay_s, partial(self.start, machine))
        for guest in range(GUESTS, GUESTS + self.guests):
            delay_s = self.scheduler.random.uniform(0.0, 8.0)
            self.scheduler.at(self.scheduler.now_s + delay_s, partial(self.start, guest))
        self.scheduler.at(self.scheduler.now_s + OPERATOR_S, operate)
        with self._patched():
            try:
                self.scheduler.run()
            finally:
                children = [child.process for child in self.machines.children]
                self.scheduler.close([*self.processes, *children])

    def describe(self) -> str:
        """Where every process is."""
        return "; ".join(
            f"{process.name}: {process.node.position if process.node else 'starting'}"
            if process.lives
            else f"{process.name}: {'killed' if process.killed else f'exit {process.code}'}"
            for process in self.processes
        )

    def tell(self, text: str) -> None:
        """Something for the story of the run."""
        self.said.append(f"{self.scheduler.now_s:9.3f} {text}")

    # ---- for the time of the run

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, self._listening():
            patches.put_under(patch, self.machines, self._model)
            patch.setattr(table, "run_phase", self._watched_phase(table.run_phase))
            patch.setattr(guest_loop, "_make", self._watched_visit(guest_loop._make))
            for further in self.patches:
                further(patch)
            yield

    def _watched_phase(self, real: Callable[..., None]) -> Callable[..., None]:
        def run_phase(node: Node, iteration: Iteration, phase: Phase, *args: Any, **more: Any) -> None:
            process = self.scheduler.process
            assert isinstance(process, NodeProcess)
            process.place = max(process.place, (iteration.number, int(phase)))
            real(node, iteration, phase, *args, **more)

        return run_phase

    def _watched_visit(self, real: Callable[..., None]) -> Callable[..., None]:
        def make(guest: Any, iteration: Iteration, phase: Phase, *args: Any) -> None:
            process = self.scheduler.process
            assert isinstance(process, NodeProcess)
            process.place = max(process.place, (iteration.number, int(phase)))
            real(guest, iteration, phase, *args)

        return make

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """What the nodes log is part of the story."""
        logger, handler = logging.getLogger("coordinator"), _Story(self)
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before


class _Story(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        current = self._world.scheduler.current
        if current is None or current.process.killed:
            return
        self._world.tell(f"{current.process.name}: {record.levelname.lower()}: {self.format(record)}")
        if record.getMessage() == "unexpected error":
            self._world.scheduler.violate(f"{current.process.name}: {self.format(record)}")
