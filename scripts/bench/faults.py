"""Measure what faults cost: disturb a real run of three nodes on this machine again and again.

    python scripts/bench/faults.py --dir DIR [--faults 10] [--seed 0]
    python scripts/bench/faults.py --dir DIR --soak MINUTES
    python scripts/bench/faults.py --dir DIR --guests 50 [--iterations 200] [--seed 0]

The first command kills and stops nodes, engines and trainers at random moments, restarts nodes as a person
would, waits until the run has gone on, and prints a line for each fault and a table. The second does not
disturb the nodes: with the default timeouts and every core busy, it counts the false alarms. The third one
runs a single node, to which guests come at random: they are killed, asked to leave, or stopped until they are
lost, and come back under the name that they had. Then it makes the same run without guests. DIR must not hold
a run.

Detection: from the fault until every surviving node has said which node is lost. First work: from the restart
of a node's command to its first flag of a phase, or its first part, in a newer epoch; if its engine started
before that, the engine's start is given separately.
"""

import argparse
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' cluster, which is not installed

from coordinator.directory import claims, published
from coordinator.directory.file_names import parse_part_name
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.directory.published import names
from coordinator.protocol.snapshot import Board, whole_board
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import UNIX
from tests.cluster import faults as evidence
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.faults import AGENT, ENGINE, TRAINER_RANK, children

NODES = 3
RUN = ("--num-nodes", str(NODES), "--iterations", "1000000", "trainer.threads_per_process=1")
REWARD = "rollout.reward=tests.cluster.plugins:digits"
BEAT_S, NODE_TIMEOUT_S = 0.5, 5.0
MANY_SMALL_ITERATIONS = (
    *FAST,
    "rollout.tasks_per_iteration=12",
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.concurrency=8",
    "eval.interval=4",
    "trainer.collective_timeout_s=20",
    "trainer.max_attempts=5",
    f"cluster.beat_s={BEAT_S}",
    f"cluster.node_timeout_s={NODE_TIMEOUT_S}",
)
PATIENCE_S = 300.0
"""A run that has made no progress by then has not recovered."""


@dataclass
class Fault:
    """One fault and what it cost; seconds are None where there is nothing to measure."""

    what: str
    rank: int
    place: str
    detected_s: float | None = None
    first_work_s: float | None = None
    engine_s: float | None = None
    recovered_s: float | None = None

    def line(self) -> str:
        """Describe the fault for a person."""
        figures = {
            "said lost after": self.detected_s,
            "first work after restart": self.first_work_s,
            "of that the engine's start": self.engine_s,
            "two more iterations after": self.recovered_s,
        }
        said = [f"{name} {seconds:.1f} s" for name, seconds in figures.items() if seconds is not None]
        return f"{self.what} (rank {self.rank}), {self.place}: {', '.join(said)}"


@dataclass
class Injector:
    """The run, the faults it has had, and the parts that were durable at each fault."""

    cluster: Cluster
    random: random.Random
    faults: list[Fault] = field(default_factory=list[Fault])
    kept: dict[Path, bytes] = field(default_factory=dict[Path, bytes])

    def start(self, rank: int) -> None:
        """Start a node, the first time or again."""
        self.cluster.start(rank, *(() if rank else (*RUN, *MANY_SMALL_ITERATIONS)))

    def inject(self, what: str) -> None:
        """Cause a fault at a random moment, do what a person would do, and wait until the run has gone on."""
        self._until(self._is_whole, "every node generates and trains")
        time.sleep(self.random.uniform(0.0, 3.0))
        ranks = [0] if "master" in what else range(1 if "worker" in what else 0, NODES)
        fault = Fault(what, self.random.choice(ranks), self._place())
        self.faults.append(fault)
        at_s = time.monotonic()
        FAULTS[what](self, fault)
        done = len(self.cluster.metrics())
        self._until(lambda: len(self.cluster.metrics()) >= done + 2, f"two more iterations after: {what}")
        fault.recovered_s = time.monotonic() - at_s
        print(fault.line(), flush=True)

    # ---- faults

    def kill(self, fault: Fault) -> None:
        """Kill a node, and restart it at once or when the others say that it is lost."""
        self.cluster.kill(fault.rank)
        if "when lost" in fault.what:
            self._wait_said_lost(fault)
        self.cluster.nodes[fault.rank].wait()
        self._restart(fault)

    def stop_until_lost(self, fault: Fault) -> None:
        """Stop a node, and let it go on when the others say that it is lost."""
        self.cluster.kill(fault.rank, signal.SIGSTOP)
        self._wait_said_lost(fault)
        self.kept.update(evidence.durable_parts(self.cluster.run_dir))
        self.cluster.kill(fault.rank, signal.SIGCONT)

    def hit_child(self, fault: Fault, kind: str, number: int) -> None:
        """Send a signal to a child of a node."""
        pid = self.cluster.nodes[fault.rank].pid
        self._until(lambda: children(pid, kind), f"rank {fault.rank} has a {kind}")[0].send_signal(number)
        self.kept.update(evidence.durable_parts(self.cluster.run_dir))

    # ---- what is measured

    def _wait_said_lost(self, fault: Fault) -> None:
        started_s = time.monotonic()
        said = re.compile(rf"rank {fault.rank} \(.*(is lost|silent for)")
        others = [rank for rank in range(NODES) if rank != fault.rank]
        marks = {rank: len(self.cluster.output(rank)) for rank in others}

        def all_have_said() -> bool:
            return all(said.search(self.cluster.output(rank)[marks[rank] :]) for rank in others)

        self._until(all_have_said, f"the others say that rank {fault.rank} is lost")
        fault.detected_s = time.monotonic() - started_s

    def _restart(self, fault: Fault) -> None:
        self.kept.update(evidence.durable_parts(self.cluster.run_dir))
        epoch = self._board().newest_epoch()
        started_s = time.monotonic()
        self.start(fault.rank)
        engine_at_s: float | None = None
        while not self._has_worked(fault.rank, epoch):
            if time.monotonic() - started_s > PATIENCE_S:
                raise SystemExit(f"rank {fault.rank} has not come back\n{self.cluster.everything_said()}")
            if fault.engine_s is None and (engine := children(self.cluster.nodes[fault.rank].pid, ENGINE)):
                engine_at_s = engine_at_s or time.monotonic()
                words = engine[0].cmdline()
                if EngineAdmin(UNIX + words[words.index("--uds") + 1]).healthy(0.5):
                    fault.engine_s = time.monotonic() - engine_at_s
            time.sleep(0.02)
        fault.first_work_s = time.monotonic() - started_s

    def _has_worked(self, rank: int, epoch: int) -> bool:
        flags = [flag for flag in self._board().flags if flag.rank == rank and flag.is_done]
        if any(flag.epoch > epoch for flag in flags):
            return True
        iterations = self.cluster.run_dir.root / "train_trajectories"
        made = map(parse_part_name, names(iterations / max(names(iterations), default="")))
        return any(part is not None and part.rank == rank and part.epoch > epoch for part in made)

    def _is_whole(self) -> bool:
        nodes = self.cluster.nodes.values()
        return all(children(node.pid, kind) for node in nodes for kind in (ENGINE, TRAINER_RANK))

    def _place(self) -> str:
        flags = [flag for flag in self._board().flags if flag.rank == 0 and flag.is_done]
        return f"iteration {max(flags).iteration} after phase {max(flags).phase}" if flags else "at the start"

    def _board(self) -> Board:
        return whole_board(self.cluster.run_dir, names)

    def _until(self, ready: Callable[[], Any], what: str) -> Any:
        def ready_and_alive() -> Any:
            codes = {rank: node.poll() for rank, node in self.cluster.nodes.items()}
            if set(codes.values()) - {None, -signal.SIGKILL}:
                raise SystemExit(f"nodes ended with {codes}\n{self.cluster.everything_said()}")
            return ready()

        return self.cluster.until(ready_and_alive, what, PATIENCE_S)


FAULTS: dict[str, Callable[[Injector, Fault], None]] = {
    "kill worker, restart at once": Injector.kill,
    "kill worker, restart when lost": Injector.kill,
    "kill master, restart at once": Injector.kill,
    "kill master, restart when lost": Injector.kill,
    "stop worker until lost": Injector.stop_until_lost,
    "kill engine": partial(Injector.hit_child, kind=ENGINE, number=signal.SIGKILL),
    "kill trainer": partial(Injector.hit_child, kind=TRAINER_RANK, number=signal.SIGKILL),
    "stop trainer": partial(Injector.hit_child, kind=TRAINER_RANK, number=signal.SIGSTOP),
    "kill agent": partial(Injector.hit_child, kind=AGENT, number=signal.SIGKILL),
}


def hurt(cluster: Cluster, count: int, seed: int) -> None:
    """Inject `count` faults, each kind once before any is repeated, and print the table."""
    injector = Injector(cluster, random.Random(seed))
    for rank in range(NODES):
        injector.start(rank)
    coming: list[str] = []
    for _ in range(count):
        coming = coming or injector.random.sample(sorted(FAULTS), len(FAULTS))
        injector.inject(coming.pop())
    cluster.kill(0, signal.SIGINT)
    codes = cluster.wait()

    had = injector.faults
    detected = [fault.detected_s for fault in had if fault.detected_s is not None]
    back = [fault.first_work_s - (fault.engine_s or 0.0) for fault in had if fault.first_work_s is not None]
    engines = [fault.engine_s for fault in had if fault.engine_s is not None]
    show(
        {
            "faults injected": len(had),
            "recovered": sum(fault.recovered_s is not None for fault in had),
            "iterations meanwhile": len(cluster.metrics()),
            "groups lost": len(evidence.lost_groups(cluster.run_dir, injector.kept)),
            "finished groups generated again": len(evidence.repeated_groups(cluster.run_dir)),
            "manifests with a slot missing or twice": len(evidence.unsound_manifests(cluster.run_dir)),
            "said lost after": f"{spread(detected)}, bound {NODE_TIMEOUT_S + 2 * BEAT_S:g} s",
            "first work after restart": f"{spread(back)}, bound 5 s, beside the engine's start",
            "the engine's start": spread(engines),
            "exit codes after Ctrl+C on the master": codes,
        }
    )


def spread(seconds: list[float]) -> str:
    """Write median and maximum."""
    found = seconds or [float("nan")]
    return f"median {statistics.median(found):.1f} s, max {max(found):.1f} s ({len(seconds)} times)"


GUESTS_AT_ONCE = 3
GUESTS_MAKE = (
    *FAST, "rollout.tasks_per_iteration=12", "rollout.concurrency=8", "trainer.threads_per_process=1",
    "rollout.environment=tests.cluster.plugins:slow", "cluster.beat_s=0.3", "cluster.node_timeout_s=3",
)  # fmt: skip
"""Two groups at once of twelve: a guest that comes in the middle finds some to make."""


class Visits:
    """Lets guests come to a run of one node, and go."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self.cluster = cluster
        self.draw = draw
        self.came = self.names = 0
        self.went: Counter[str] = Counter()
        self.kept: dict[Path, bytes] = {}
        self._stopped: dict[int, float] = {}
        """By number of the guest: when it goes on."""

    def here(self) -> list[int]:
        """Return the guests whose process is there."""
        return [key for key, node in self.cluster.nodes.items() if key and node.poll() is None]

    def come(self) -> None:
        """Start a guest: a new one, or another process of one that was there, or still is."""
        self.came += 1
        name = self.draw.randrange(self.names) if self.names and self.draw.random() < 0.4 else self.names
        self.names = max(self.names, name + 1)
        self.cluster.start(self.came, "--name", f"guest {name}", role=["guest"])

    def go(self, guest: int) -> None:
        """End a guest somehow, or stop it until it is lost."""
        how = self.draw.choice(["kill", "leave", "stop"]) if guest not in self._stopped else "kill"
        self.went[how] += 1
        self.kept.update(evidence.durable_parts(self.cluster.run_dir, len(self.cluster.metrics())))
        numbers = {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "stop": signal.SIGSTOP}
        self.cluster.kill(guest, numbers[how])
        if how == "stop":
            self._stopped[guest] = time.monotonic() + self.draw.uniform(1.0, 8.0)

    def wake(self, now_s: float = math.inf) -> None:
        """Let stopped guests go on whose time has come."""
        for guest in [guest for guest, at_s in self._stopped.items() if at_s <= now_s]:
            del self._stopped[guest]
            if self.cluster.nodes[guest].poll() is None:
                self.cluster.kill(guest, signal.SIGCONT)


def visit(cluster: Cluster, alone: Cluster, count: int, iterations: int, seed: int) -> None:
    """Have `count` guests come and go in a run, compare it with the same run alone, and print the table."""
    length = ("--num-nodes", "1", "--iterations", str(iterations), "--eval-interval", "20")
    began_s = time.monotonic()
    cluster.environment["SLOW_S"] = "0.25"
    visits = Visits(cluster, random.Random(seed))
    cluster.start(0, *length, *GUESTS_MAKE)
    cluster.until(cluster.metrics, "the first iteration")
    while cluster.nodes[0].poll() is None:
        done = len(cluster.metrics()) / iterations
        here = visits.here()
        if visits.came < count * min(1.0, 1.1 * done) and len(here) <= GUESTS_AT_ONCE:
            visits.come()
        elif len(here) > GUESTS_AT_ONCE - 1 and visits.draw.random() < 0.1:
            visits.go(visits.draw.choice(here))
        visits.wake(time.monotonic())
        time.sleep(0.1)
    visits.wake()
    codes = Counter(cluster.wait(120.0))
    took_s = time.monotonic() - began_s
    alone.environment["SLOW_S"] = "0"
    alone.run(1, *length, *GUESTS_MAKE, timeout_s=3600.0)
    run_dir = cluster.run_dir
    makers = Counter(
        "guests" if part["rank"] >= GUESTS else "the node"
        for number in range(1, iterations + 1)
        for part in (published.read_manifest(run_dir, "train", number) or {"parts": []})["parts"]
        for _slot in part["slots"]
    )
    ours, theirs = policies(run_dir, iterations), policies(alone.run_dir, iterations)
    show(
        {
            "guests that came, under names": f"{visits.came}, {visits.names}",
            "how they went": dict(visits.went),
            "iterations": f"{len(cluster.metrics())} in {took_s:.0f} s",
            "groups by": dict(makers),
            "groups lost": len(evidence.lost_groups(run_dir, visits.kept)),
            "groups made twice": len(evidence.repeated_groups(run_dir)),
            "manifests with a slot missing or twice": len(evidence.unsound_manifests(run_dir)),
            "claims left of earlier iterations": len(claims.left_over(run_dir, 2, iterations - 1)),
            "processes left": len(cluster.left_behind()),
            "policies that differ from the run alone": f"{len(set(ours) - set(theirs))} of {len(ours)}",
            "exit codes": dict(sorted(codes.items())),
        }
    )


def policies(run_dir: RunDir, iterations: int) -> list[str]:
    """Return the digests of the policies that sampled each iteration, and of the last one."""
    manifests = [published.read_manifest(run_dir, "train", 1 + done) for done in range(iterations)]
    sampled = [manifest["policy"] for manifest in manifests if manifest]
    return [*sampled, published.policy_of(run_dir, iterations).digest]


@contextmanager
def busy_cores() -> Iterator[int]:
    """Keep every core busy with a process; yield their number."""
    count = os.cpu_count() or 1
    burn = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    burning = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in burning:
            process.kill()
            process.wait()


def soak(cluster: Cluster, minutes: float) -> None:
    """Run with default timeouts, full load and no faults: each report of a fault is a false alarm."""
    with busy_cores() as busy:
        for rank in range(NODES):
            cluster.start(rank, *(() if rank else (*RUN, "tiny.warmup_steps=0", REWARD)))
        cluster.until(cluster.metrics, "the first iteration", 600.0)
        ends_s = time.monotonic() + 60.0 * minutes
        while time.monotonic() < ends_s and all(node.poll() is None for node in cluster.nodes.values()):
            time.sleep(1.0)
        load = os.getloadavg()[0]
        ended = {rank: node.poll() for rank, node in cluster.nodes.items() if node.poll() is not None}
        cluster.kill(0, signal.SIGINT)
        cluster.wait()
    board = whole_board(cluster.run_dir, names)
    epochs = max(0, board.newest_epoch() - 2)  # a lobby and a full one are how every run begins
    alarms = re.findall(r"is lost|silent for|failed in|no answer from", cluster.everything_said())
    show(
        {
            "minutes, nodes": f"{minutes:g}, {NODES}",
            "load average, busy cores beside the run": f"{load:.1f}, {busy}",
            "iterations": len(cluster.metrics()),
            "false alarms": len(alarms),
            "epochs beside the first": epochs,
            "nodes that ended": ended or "none",
        }
    )


def show(figures: dict[str, Any]) -> None:
    """Print a table of two columns."""
    for name, figure in figures.items():
        print(f"{name:<41}{figure}")


@contextmanager
def new_cluster(
    parser: argparse.ArgumentParser, directory: Path, name: str = "run", separate: bool = False
) -> Iterator[Cluster]:
    """Yield the nodes of a new run below `directory`, and leave no process of theirs. `separate`: nodes start
    engines and trainers themselves, as those of several machines do.
    """
    root = directory.absolute()
    if (root / name).exists():
        parser.error(f"--dir {root}: there is a run already; give another directory")
    (logs := root / "output" / name).mkdir(parents=True, exist_ok=True)
    cluster = Cluster(root / name, root / "cache", logs, separate)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the nodes are ended
    try:
        yield cluster
    finally:
        cluster.close()


def main() -> None:
    """Run one of the three commands, and leave no process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--guests", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    with new_cluster(parser, options.dir, separate=not options.guests) as cluster:
        if options.guests:
            with new_cluster(parser, options.dir, "alone") as alone:
                visit(cluster, alone, options.guests, options.iterations, options.seed)
        elif options.soak:
            soak(cluster, options.soak)
        else:
            hurt(cluster, options.faults, options.seed)


if __name__ == "__main__":
    main()
