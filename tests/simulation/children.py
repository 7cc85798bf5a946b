"""What the nodes start, without processes.

The product's hosts (`engine_host`, `trainer_host`) and the spool between a node and its trainer are real.
A child is a process of its own here too: it goes on while its node is stopped, and is killed a moment after
that has been.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.collector import process
from tests.simulation.disk import Disk
from tests.simulation.engines import Engine
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.trainers import Job, Trainer

ORPHAN_S = 2.0
"""How long the reaper of a killed node takes to kill its children, at most."""
LATE_WORD_S = 20.0
"""When it has said the node's last word, at the latest: another process of that rank may be there by then."""


class Machines:
    """Everything that children need, and all that there are."""

    def __init__(self, scheduler: Scheduler, disk: Disk, scratch: Path) -> None:
        self.scheduler = scheduler
        self.disk = disk
        self.scratch = scratch
        self.jobs: dict[str, Job] = {}
        self.engines: dict[str, Engine] = {}
        self.children: list[Child] = []
        self.numbers = itertools.count(1)
        self.last_words: dict[Process, tuple[Path, bytes]] = {}

    def of(self, node: Process, name: str) -> "list[Child]":
        """The living children of a node that bear this name."""
        return [child for child in self.children if child.node is node and child.name == name and child.lives]

    def orphan(self, node: Process) -> None:
        """The node is gone: its reaper kills what it has left, and says its last word. Every other time it
        says none, as if the machine had died.
        """
        for child in [child for child in self.children if child.node is node and child.lives]:
            delay_s = self.scheduler.random.uniform(0.0, ORPHAN_S)
            self.scheduler.at(self.scheduler.now_s + delay_s, child.kill_now)
        if node in self.last_words and self.scheduler.random.random() < 0.5:
            path, content = self.last_words[node]
            delay_s = self.scheduler.random.uniform(ORPHAN_S, LATE_WORD_S)
            self.scheduler.at(self.scheduler.now_s + delay_s, partial(_write, path, content))


class Child:
    """The simulation's child.Child."""

    def __init__(self, machines: Machines, node: Process, name: str, spool: Path) -> None:
        self.name = name
        self.node = node
        self.spool = spool
        self.pid = next(machines.numbers)
        acts_for = node if name == "collector" else None
        self.process = Process(f"{node.name} {name} {self.pid}", node.host, acts_for=acts_for)
        self.code: int | None = None
        self._machines = machines
        machines.children.append(self)

    @property
    def lives(self) -> bool:
        return self.code is None

    def begin(self, program: Callable[[], int]) -> None:
        """Run `program`; what it returns is the exit code."""

        def run() -> None:
            code = program()
            self.code = code if self.code is None else self.code

        self._machines.scheduler.spawn(self.process, run)

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout_s: float) -> int | None:
        if self.lives:
            self._machines.scheduler.wait(timeout_s)
        return self.code

    def kill_now(self) -> None:
        if self.lives:
            self.code = -9
            self._machines.scheduler.kill(self.process)

    def kill(self) -> bool:
        self.kill_now()
        return True

    def stop(self, grace_s: float) -> bool:
        return self.kill()

    terminate = kill_now

    def tail(self, lines: int = 20) -> str:
        return f"the last words of {self.process.name}"


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _collect(spool: Path) -> int:
    """Run the product's collector."""
    process.asyncio.run(process.live(process.CollectorProcess(spool)))
    return 1


class Children:
    """The simulation's children.Children, for the node that makes it."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._node = machines.scheduler.process
        self.spool = machines.scratch / self._node.name
        self.shares_imports = False
        self.group, self.python = None, "python"

    def explained(self, error: BaseException) -> BaseException:
        return error

    def new_spool(self, name: str) -> Path:
        spool = self.spool / f"{name}-{next(self._machines.numbers)}"
        spool.mkdir(parents=True)
        return spool

    def start(
        self,
        name: str,
        argv: Sequence[Any],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        echo: Callable[[str], None] | None = None,
        spool: Path | None = None,
    ) -> Child:
        child = Child(self._machines, self._node, name, spool or self.new_spool(name))
        if name == "trainer":
            job, machines = argv[0], self._machines
            trainer = Trainer(machines.scheduler, machines.disk, machines.jobs, job, lambda: child.lives)
            child.begin(trainer.run)
        elif name == "collector":
            child.begin(partial(_collect, Path(argv[-1])))
        else:
            said = {key: argv[number + 1] for number, key in enumerate(argv) if str(key).startswith("--")}
            engine = Engine(self._machines.scheduler, lambda: child.lives, said["--model"])
            self._machines.engines[f"unix:{said['--uds']}"] = engine
        return child

    def kill_groups(self) -> bool:
        for child in self._machines.children:
            if child.node is self._node:
                child.kill_now()
        return True

    def leave_word(self, path: Path, content: bytes) -> None:
        self._machines.last_words[self._node] = path, content

    def close(self, grace_s: float = 5.0) -> None:
        self._machines.last_words.pop(self._node, None)
        self.kill_groups()
