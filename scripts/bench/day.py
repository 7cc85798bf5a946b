"""Run a long day in small: thousands of iterations of the tiny model, and every half minute a node is killed.

    python scripts/bench/day.py --dir DIR [--iterations 2000] [--kill-every 30] [--seed 0]

Three real nodes of this machine generate with the embedded engine and train. Every `--kill-every` seconds
one of them, the master too, is killed with -9; its command is given again at once, or after the others have
called it lost. Prints a line at every tenth of the run, then a table: what was lost, and for each kind of
process the memory (resident, MB, the highest process) and open descriptors in every tenth. DIR must not hold
a run.
"""

import argparse
import random
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from faults import new_cluster, show

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' cluster, which is not installed

from tests.cluster import faults as evidence
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.faults import AGENT, ENGINE, TRAINER_RANK, children

NODES = 3
NODE_TIMEOUT_S = 6.0
SETTINGS = (
    *FAST,
    "eval.interval=50",
    "trainer.threads_per_process=1",
    "trainer.collective_timeout_s=20",
    "cluster.beat_s=0.5",
    f"cluster.node_timeout_s={NODE_TIMEOUT_S}",
)
TENTHS = 10
LOOK_S = 2.0
STUCK_S = 300.0
"""A run that has ended no iteration for so long is stuck."""


@dataclass
class Tenth:
    """What was seen in a tenth of the run: the highest figure of any process, by kind."""

    kills: int = 0
    memory_mb: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    descriptors: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))

    def look(self, cluster: Cluster) -> None:
        """Look at every process of the nodes once."""
        for rank, node in cluster.nodes.items():
            kinds = {"master" if rank == 0 else "worker": [node.pid]}
            for kind, words in {"engine": ENGINE, "agent": AGENT, "trainer": TRAINER_RANK}.items():
                kinds[kind] = [child.pid for child in children(node.pid, words)]
            for kind, pids in kinds.items():
                for pid in pids:
                    try:
                        process = psutil.Process(pid)
                        memory_mb, descriptors = process.memory_info().rss / 1e6, process.num_fds()
                    except psutil.Error:
                        continue
                    self.memory_mb[kind] = max(self.memory_mb[kind], memory_mb)
                    self.descriptors[kind] = max(self.descriptors[kind], descriptors)


class Day:
    """The run, who is to be killed or restarted when, and what has been seen."""

    def __init__(self, cluster: Cluster, options: argparse.Namespace) -> None:
        self.tenths = [Tenth() for _ in range(TENTHS)]
        self.kept: dict[Path, bytes] = {}
        self._cluster = cluster
        self._options = options
        self._random = random.Random(options.seed)
        self._read = self._done = 0

    def live(self) -> list[int]:
        """Run all iterations and return the exit codes of the nodes."""
        for rank in range(NODES):
            self._start(rank)
        kill_at_s = time.monotonic() + self._options.kill_every
        moved_s = time.monotonic()
        back: tuple[float, int] | None = None
        while self._cluster.nodes[0].poll() in {None, -signal.SIGKILL}:
            time.sleep(LOOK_S)
            if self._count():
                moved_s = time.monotonic()
            if time.monotonic() - moved_s > STUCK_S:
                raise SystemExit(f"no iteration has ended for {STUCK_S:.0f} s")
            tenth = self.tenths[min(TENTHS - 1, self._done * TENTHS // self._options.iterations)]
            tenth.look(self._cluster)
            if back and time.monotonic() >= back[0]:
                self._start(back[1])
                back = None
            if time.monotonic() >= kill_at_s and self._done < self._options.iterations - 2:
                rank = self._random.randrange(NODES)
                self._keep()
                self._cluster.kill(rank)
                self._cluster.nodes[rank].wait()
                tenth.kills += 1
                back = (time.monotonic() + self._random.choice((0.0, 2 * NODE_TIMEOUT_S)), rank)
                kill_at_s = time.monotonic() + self._options.kill_every
        return self._cluster.wait(60.0)

    def _start(self, rank: int) -> None:
        run = ("--num-nodes", str(NODES), "--iterations", str(self._options.iterations), *SETTINGS)
        self._cluster.start(rank, *(() if rank else run))

    def _count(self) -> bool:
        """Count the lines of metrics.jsonl; whether there are new ones."""
        path = self._cluster.run_dir.metrics
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        before, self._done = self._done, self._done + data.count(b"\n")
        step = max(1, self._options.iterations // TENTHS)
        if before // step != self._done // step:
            kills = sum(tenth.kills for tenth in self.tenths)
            print(f"{time.strftime('%H:%M:%S')}: {self._done} iterations, {kills} kills", flush=True)
        return self._done > before

    def _keep(self) -> None:
        """Remember the parts of the newest iterations: none of their groups may be lost."""
        self.kept.update(evidence.durable_parts(self._cluster.run_dir, since=self._done))


def figures_of(cluster: Cluster, day: Day, codes: list[int], seconds: float) -> dict[str, Any]:
    """Return the table of a day that has ended."""
    numbers = [line["iteration"] for line in cluster.metrics()]
    figures: dict[str, Any] = {
        "kills": sum(tenth.kills for tenth in day.tenths),
        "hours": f"{seconds / 3600:.2f}",
        "exit codes": codes,
        "iterations, each once and in order": numbers == list(range(1, len(numbers) + 1)) and len(numbers),
        "groups lost": len(evidence.lost_groups(cluster.run_dir, day.kept)),
        "finished groups generated again": len(evidence.repeated_groups(cluster.run_dir)),
        "manifests with a slot missing or twice": len(evidence.unsound_manifests(cluster.run_dir)),
        "names in protocol/ at the end": sum(
            len(list(directory.iterdir())) for directory in cluster.run_dir.protocol
        ),
    }
    for kind in day.tenths[0].memory_mb:
        figures[f"{kind}: MB, in every tenth"] = [round(tenth.memory_mb[kind]) for tenth in day.tenths]
        figures[f"{kind}: descriptors"] = [tenth.descriptors[kind] for tenth in day.tenths]
    return figures


def main() -> None:
    """Read the options, run the day, and leave no process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with new_cluster(parser, options.dir) as cluster:
        day, started_s = Day(cluster, options), time.monotonic()
        codes = day.live()
        show(figures_of(cluster, day, codes, time.monotonic() - started_s))


if __name__ == "__main__":
    main()
