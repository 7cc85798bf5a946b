"""One task runs at a time, until it waits; the scheduler then runs the next one due, and moves the clock.

A task is a thread with a baton. A wait of a task (a sleep, an event, a lock, a call on the shared directory)
hands the baton to the task whose turn is next; simulated time passes between turns only. So a run is a
function of what it was given: the same faults and seed, the same run.
"""

import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

STUCK_S = 120.0
"""Real seconds after which a run that does not come to its end is given up."""


class Killed(BaseException):
    """This process is no more: flies through a killed task, which touches nothing on its way out."""


class Stuck(AssertionError):
    """A task waits for something outside of the simulation."""


@dataclass(eq=False)
class Process:
    """A process: the tasks that are killed and paused together."""

    name: str
    host: str
    clock_offset_s: float = 0.0
    """Offset of its machine's clock: no two clocks agree."""
    killed: bool = False
    paused_until_s: float = 0.0
    tasks: "list[Task]" = field(default_factory=list)
    acts_for: "Process | None" = None
    """The node whose collector this is: what it does on the directory, it does for that node."""


class Task:
    """A thread of a process."""

    def __init__(
        self, scheduler: "Scheduler", process: Process, run: Callable[[], object], name: str = ""
    ) -> None:
        self.process = process
        self.name = name
        self.turn = 0
        """Grows whenever it waits or goes on: an older wake-up is void."""
        self.is_done = False
        self.done = Event(scheduler)
        self._scheduler = scheduler
        self._run = run
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread = threading.Thread(target=self._live, name=process.name, daemon=True)

    def _live(self) -> None:
        self.baton.acquire()
        try:
            if not self.process.killed:
                self._run()
        except Killed:
            pass
        except BaseException:
            self._scheduler.violate(f"{self.process.name}: uncaught in a thread\n{traceback.format_exc()}")
        self.is_done = True
        self.process.tasks.remove(self)
        self.done.set()
        self._scheduler.give_way(None)


Due = Callable[[], None] | tuple[Task, int]


class Scheduler:
    """The clock, the queue of what is due, and the first violation."""

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.stuck_s = STUCK_S
        self.random = random.Random(seed)
        self.current: Task | None = None
        self.violation: str | None = None
        self.turns = 0
        self._queue: list[tuple[float, int, Due]] = []
        """When, in which order, and what: a call, or the turn of a task, unless it has had that already."""
        self._numbers = itertools.count()
        self._is_over = False
        self._is_closing = False
        self._controller = threading.Lock()
        self._controller.acquire()

    # ---- from outside

    def spawn(self, process: Process, run: Callable[[], object], name: str = "") -> Task:
        """A task that begins at once."""
        task = Task(self, process, run, name)
        process.tasks.append(task)
        task.thread.start()
        self.wake(task)
        return task

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call `call` at `time_s`, between two turns; it may not wait."""
        self._push(time_s, call)

    def _push(self, time_s: float, due: Due) -> None:
        heapq.heappush(self._queue, (time_s, next(self._numbers), due))

    def run(self) -> None:
        """Let everything happen, until `end` is called or nothing is left to do."""
        self._is_over = False
        self.give_way(None)
        if not self._controller.acquire(timeout=self.stuck_s):
            raise Stuck(f"no end after {self.stuck_s} s; threads:\n{_stacks()}")

    def end(self) -> None:
        """Come to the end of `run` at the next wait."""
        self._is_over = not self._is_closing

    def close(self, processes: Iterable[Process]) -> None:
        """End every thread; nothing else happens any more."""
        self._is_closing = True
        self._queue.clear()
        for process in processes:
            self.kill(process)
        self.run()

    def violate(self, text: str) -> None:
        """An invariant does not hold: the first one that fails is what the run has found."""
        if self.violation is None:
            self.violation = f"at {self.now_s:.3f} s: {text}"
        self.end()

    def kill(self, process: Process) -> None:
        """SIGKILL: its tasks unwind without a turn for anybody else, and no call of theirs has an effect."""
        process.killed = True
        for task in process.tasks:
            if task is not self.current:
                self.wake(task)

    # ---- for the running task

    @property
    def process(self) -> Process:
        """Whose task is running."""
        assert self.current is not None
        return self.current.process

    def wait(self, seconds: float | None) -> None:
        """The running task waits: for so long, or (None) until it is woken."""
        task = self.current
        assert task is not None
        if task.process.killed:
            raise Killed
        if seconds is not None:
            self._push(self.now_s + max(seconds, 0.0), self._waking(task))
        self.give_way(task)
        if task.process.killed:
            raise Killed

    def wake(self, task: Task) -> None:
        """End the wait of a task now."""
        self._push(self.now_s, self._waking(task))

    def _waking(self, task: Task) -> tuple[Task, int]:
        return (task, task.turn)

    def give_way(self, waiting: Task | None) -> None:
        """Run what is due next in the place of `waiting` (None: a task that has ended, or the controller)."""
        self.current = None
        self.current = following = self._next()
        if following is waiting and waiting is not None:
            return
        (following.baton if following is not None else self._controller).release()
        if waiting is not None:
            waiting.baton.acquire()

    def _next(self) -> Task | None:
        """The task whose turn is next; None when the run is over."""
        while self._queue and not self._is_over:
            due_s, _number, item = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, due_s)
            if not isinstance(item, tuple):
                self._call(item)
                continue
            task, turn = item
            if task.is_done or task.turn != turn:
                continue
            if task.process.paused_until_s > self.now_s and not task.process.killed:
                self._push(task.process.paused_until_s, item)
                continue
            task.turn += 1
            self.turns += 1
            return task
        return None

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException:
            self.violate(f"uncaught in the simulation itself\n{traceback.format_exc()}")


class Event:
    """The simulation's threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current
        if self._is_set or task is None:
            return self._is_set
        self._waiting.append(task)
        try:
            self._scheduler.wait(timeout)
        finally:
            self._waiting.remove(task)
        return self._is_set


class RLock:
    """The simulation's threading.RLock; for one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.current
        assert task is not None
        deadline_s = None if timeout < 0 else self._scheduler.now_s + timeout
        while self._owner not in {None, task}:
            left_s = None if deadline_s is None else deadline_s - self._scheduler.now_s
            if not blocking or (left_s is not None and left_s <= 0):
                return False
            self._waiting.append(task)
            try:
                self._scheduler.wait(left_s)
            finally:
                self._waiting.remove(task)
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            for task in self._waiting:
                self._scheduler.wake(task)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class Thread:
    """The simulation's threading.Thread: another task of the process that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._target = target
        self._args = args
        self._task: Task | None = None

    def start(self) -> None:
        process = self._scheduler.process
        self._task = self._scheduler.spawn(process, lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        self._task.done.wait(timeout)


def _stacks() -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"--- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
