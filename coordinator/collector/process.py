"""The collector of a node: the process in which environments and rewards run.

    python -m coordinator.collector.process SPOOL

It does what its node orders (`coordinator.collector.order`), one order after the other, and says through its
mailbox what it has reached. It writes parts and claims itself. What is in flight when an order ends stays in
flight until the next one says what goes on; what is finished meanwhile is kept, and published by nobody.

User code may block this process, end it, or change it in any way. It harms its own group, or at worst what is
in flight here: the node ends a collector that does not answer, and starts another one.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coordinator.collector.collection import Collection, NodeSide, own_task, slots_of
from coordinator.collector.mailbox import COLLECTOR_BELL, Mailbox, order_path
from coordinator.collector.making import GroupsInFlight
from coordinator.collector.order import Order, describe_error
from coordinator.journal.logs import is_for_people
from rollout.collect import OURS, Stopped
from rollout.module_search import keep_process
from rollout.slots import ListedSlots
from rollout.storage.retry import SharedFsError, waiting_for_space
from rollout.tally import Tally
from trainer.job.doorbell import Doorbell

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often the collector looks for messages while its bell is silent."""
TICK_S = 0.5
"""How often it says that its event loop runs."""
PACKAGES = ("rollout", "trainer", "coordinator")
MOST_THREADS = 1024
"""User code may leave threads of `asyncio.to_thread` that never end; ours must not wait for them."""


class Bell:
    """The collector's bell, in its event loop."""

    def __init__(self, spool: Path) -> None:
        self._bell = Doorbell(spool / COLLECTOR_BELL)
        self._rung = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._bell.descriptor, self._rung.set)

    async def wait(self, timeout_s: float) -> None:
        """Return once it has been rung since the last wait, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()
        self._bell.wait(0.0)


class CollectorProcess:
    """Does what the orders of the node say, until it is killed."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self._pid = os.getpid()
        self._number = 0
        """Number of the present or last order."""
        self._box = Mailbox.of_collector(spool, 0)
        self._making: GroupsInFlight | None = None
        self._collection: Collection | None = None
        """The newest one: it may have finished groups that are not durable yet."""
        self._node = NodeSide(self._send, self._ask, self._step)
        self._questions = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._steps = 0
        self._tally = Tally(log)  # of the process: each traceback is shown once, not in each iteration
        self._obeying: asyncio.Task[None] | None = None

    async def live(self) -> None:
        """Take up orders and messages for ever."""
        bell = Bell(self.spool)
        own_task(self._tick())
        while True:
            for message in self._box.receive():
                self._hear(message)
            is_idle = self._obeying is None or self._obeying.done()
            if is_idle and order_path(self.spool, self._number + 1).exists():
                self._number += 1
                self._box = Mailbox.of_collector(self.spool, self._number)
                continue
            await bell.wait(LOOK_S)

    def _hear(self, message: dict[str, Any]) -> None:
        if "order" in message:
            self._node.begin()
            self._obeying = own_task(self._obey(Order.from_json(message["order"])))
        elif "others_are_done" in message:
            self._node.others_are_done = True
        elif "lost" in message:
            self._node.lost, self._node.guests = message["lost"], dict(message["guests"])
        elif "leave" in message:
            if self._collection is not None:
                self._collection.leave()
        elif "drop" in message:
            self._obeying = own_task(self._drop())
        elif "pause" in message:
            self._node.stop.set()
        elif "flush" in message:
            own_task(self._flush_and_say())
        elif "answer" in message:
            waiting = self._answers.pop(message["answer"])
            if not waiting.done():  # nor cancelled
                waiting.set_result(message["value"])

    def send_log(self, record: logging.LogRecord, text: str) -> None:
        """Have the node log a line; for any thread."""
        event = getattr(record, "event", None)
        self._send({"log": [record.levelno, record.name, text, event]})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._box.send(message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._end_fork()
            if self._obeying is not None and not self._obeying.done():
                steps, self._steps = self._steps, 0
                self._send({"steps": steps})

    def _end_fork(self) -> None:
        """End this process if it is a fork by user code, which has come back to us twice."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _step(self) -> None:
        self._steps += 1

    def _say_begun(self, slot: int) -> None:
        self._send({"begun": slot})

    async def _ask(self, question: str, argument: Any) -> Any:
        """Return the node's answer."""
        number = next(self._questions)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send({"ask": question, "about": argument, "number": number})
        return await answer

    # ---- orders

    async def _drop(self) -> None:
        if self._making is not None:
            making, self._making = self._making, None
            await making.end()
        self._send({"ended": {}})

    async def _obey(self, order: Order) -> None:
        """Do an order, and say how it has ended."""
        try:
            ended = await (self._begin(order) if order.is_held else self._collect(order))
        except Stopped:
            ended = {"paused": self._making.collector.open_slots if self._making else []}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the user's module may raise SystemExit when it is imported
            ended = {"error": describe_error(error)}
        self._end_fork()
        self._tally.say_counts()  # before whatever ends the phase is said, which may be the last line of all
        self._send({"ended": ended})

    async def _made_by(self, order: Order) -> GroupsInFlight:
        """Return the Making of the order's groups: the one in flight, if the order goes on with that."""
        if self._making is not None and self._making.key != order.key:
            ended, self._making = self._making, None
            await ended.end()
        if self._making is None:
            self._making = GroupsInFlight(order, self._say_begun, self._step, self._tally)
            await self._making.enter()
        return self._making

    async def _begin(self, order: Order) -> dict[str, Any]:
        """Make groups ahead of their phase, and hold them."""
        making = await self._made_by(order)
        began_s, ahead_s = time.monotonic(), 0.0
        slots = await slots_of(order, self._node, order.slots)
        beginning = own_task(making.collector.begin(ListedSlots(slots)))
        while not self._node.stop.is_set() and not beginning.done():
            await asyncio.sleep(LOOK_S / 5)
            if making.collector.is_busy:
                ahead_s = time.monotonic() - began_s
        if beginning.done():
            beginning.result()  # raises
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        return {"paused": making.collector.open_slots, "ahead_s": ahead_s}

    async def _collect(self, order: Order) -> dict[str, Any]:
        """Make groups, and make them durable as they are finished."""
        making = await self._made_by(order)
        self._collection = Collection(order, self._node, making.collector)
        ended = await self._collection.run()
        self._making = None
        await making.end()
        return ended

    # ---- what is durable

    async def _flush_and_say(self) -> None:
        """Write what is left, for the node, which waits for it."""
        try:
            if self._collection is not None:
                await self._collection.flush()
        except Exception as error:  # the node decides whether it asks again
            self._send({"flushed": describe_error(error)})
        else:
            self._send({"flushed": None})

    def say_full(self, error: SharedFsError) -> None:
        """Tell the node that a call here waits for free space; for any thread."""
        self._send({"full": describe_error(error)})


class _ToNode(logging.Handler):
    """Hands log lines to the node, which shows them as its own."""

    def __init__(self, process: CollectorProcess) -> None:
        super().__init__()
        self.addFilter(is_for_people)
        self._process = process
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._process.send_log(record, self.format(record))


async def live(process: CollectorProcess) -> None:
    """Do what the node orders, until the node ends this process."""
    with waiting_for_space(math.inf, process.say_full):
        try:
            await process.live()
        except FileNotFoundError:
            if process.spool.exists():
                raise  # else its node, which says so, ends as well


def main() -> int:
    """Run the collector."""
    process = CollectorProcess(Path(sys.argv[1]))
    _set_up_log(process)
    keep_process()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # hundreds of samples have connections each
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the node ends this process
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
    living = loop.create_task(live(process), name=OURS)
    while not living.done():
        # A task of user code that raises these ends the loop; whoever awaits the task gets them too.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(living)
    return 1


def _set_up_log(process: CollectorProcess) -> None:
    """Send log lines to the node, also those of this program if user code sets up the root logger anew."""
    handler = _ToNode(process)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("rollout.storage.retry").setLevel(logging.DEBUG)  # for the node's events alone


if __name__ == "__main__":
    # Nothing of the user's, no thread and no handler of atexit, holds up the end of this process.
    code = main()
    sys.stdout.flush()
    os._exit(code)
