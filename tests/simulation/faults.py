"""What can happen to a run, and when: drawn by hypothesis, so a failure shrinks to few and early faults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hypothesis import strategies as st

from tests.simulation.scheduler import Process
from tests.simulation.world import NodeProcess, World

Action = Literal[
    "kill", "pause", "replace", "twin", "leave", "trainer", "engine", "collector", "freeze", "freeze_all"
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)
EXPIRES_S = 400.0
"""A fault whose moment does not come within this time is left out."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens to a process of `rank`, once that has come to phase `phase` of `iteration` (or
    farther) and then made `calls` calls on the shared directory; counted from the fault before this one.

    kill        SIGKILL; started again after `seconds`
    pause       SIGSTOP for `seconds`
    replace     SIGSTOP for `seconds`; in the middle of it another process of the rank is started
    twin        another process of the rank is started while this one lives
    leave       SIGTERM; started again after `seconds`
    trainer     its part of the training job is killed, if there is one
    engine      its engine is killed, if there is one; not twice in a row of the table, as a run ends if an
                engine has ended twice in its start
    freeze      its mount hangs for `seconds`; freeze_all: all mounts do
    """

    action: Action
    rank: int
    iteration: int
    phase: int
    calls: int
    seconds: float


class Injector:
    """Lets the faults happen, one after the other."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world = world
        self._left = list(faults)
        self._calls = 0
        self._engine_ended: dict[NodeProcess, tuple[int, int]] = {}
        """Where a node was when its engine was killed last."""
        self._armed_s = world.scheduler.now_s
        world.disk.on_call = self._on_call

    def are_over(self) -> bool:
        """Whether nothing else will happen."""
        if self._left and self._world.scheduler.now_s > self._armed_s + EXPIRES_S:
            self._next()
        return not self._left

    def _on_call(self, process: Process) -> None:
        process = process.acts_for or process
        if not self._left or not isinstance(process, NodeProcess):
            return
        fault = self._left[0]
        if process.machine != fault.rank or process.place < (fault.iteration, fault.phase):
            return
        self._calls += 1
        if self._calls > fault.calls:
            self._next()
            self._happen(fault, process)

    def _next(self) -> None:
        self._left.pop(0)
        self._calls = 0
        self._armed_s = self._world.scheduler.now_s

    def _happen(self, fault: Fault, process: NodeProcess) -> None:
        world, scheduler = self._world, self._world.scheduler
        if fault.action in {"kill", "leave"}:
            (world.kill if fault.action == "kill" else world.interrupt)(process)
            world.disturb(fault.seconds)
            scheduler.at(scheduler.now_s + fault.seconds, lambda: world.start_again(fault.rank))
        elif fault.action in {"pause", "replace"}:
            world.pause(process, fault.seconds)
            if fault.action == "replace":
                scheduler.at(scheduler.now_s + fault.seconds / 2, lambda: world.start_twin(fault.rank))
        elif fault.action == "twin":
            world.start_twin(fault.rank)
        elif fault.action in {"trainer", "engine", "collector"}:
            if fault.action == "engine" and self._engine_ended.get(process) == process.place:
                return
            self._engine_ended |= {process: process.place} if fault.action == "engine" else {}
            for child in world.machines.of(process, fault.action):
                world.tell(f"{child.process.name} is killed")
                child.kill_now()
        else:
            world.freeze(process.host if fault.action == "freeze" else "", fault.seconds)


def faults(nodes: int, actions: Sequence[Action]) -> st.SearchStrategy[Fault]:
    """Any fault: of short, long and very long duration; node_timeout is 30 s."""
    seconds = st.one_of(st.floats(0.0, 5.0), st.floats(20.0, 45.0), st.floats(45.0, 150.0))
    return st.builds(
        Fault,
        action=st.sampled_from(actions),
        rank=st.integers(0, nodes - 1),
        iteration=st.integers(0, 2),
        phase=st.integers(0, 13),
        calls=st.integers(0, 12) | st.integers(0, 60),
        seconds=seconds.map(lambda value: round(value, 2)),
    )
