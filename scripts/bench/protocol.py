"""Measure what the protocol costs: iterations of 14 phases without work, by N real node processes.

Prints one JSON line: seconds per iteration (median, p99), metadata operations per node and phase (heartbeats
included), bytes and files left on disk. `--phases` adds a table: the calls of an iteration on the directory,
by phase, and how long they took. `--real` runs real iterations (8 x 4 samples of the built-in model) instead.

    python scripts/bench/protocol.py --nodes 3 --dir /tmp/bench
    python scripts/bench/protocol.py --nodes 3 --filesystem glusterfs --phases

`--filesystem` serves a filesystem of `tests/filesystems` on this machine, and mounts it once for each node;
`--dirs` takes mounts of yours.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' mounts, which are not installed

from coordinator.directory.layout import RunDir
from coordinator.journal import logs
from coordinator.main import run_to_exit_code
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import table as main_loop
from coordinator.phases.crews import open_when_ready
from coordinator.phases.run_phase import Act, Beside, Conclude, run_phase
from coordinator.protocol.phase import Phase
from coordinator.start.request import StartRequest
from coordinator.start.start import start_master, start_worker
from rollout.storage import files
from scripts.bench.calls import Calls, table

WARM_UP = 3
"""First iterations, which do not count."""
BETWEEN, AFTER = "before phase 0", "after all"
REAL: dict[str, Any] = {
    "tiny.warmup_steps": 0,
    "rollout.tasks_per_iteration": 8,
    "rollout.samples_per_task": 4,
    "trainer.global_batch_size": 16,
    "eval.interval": 0,
}


SAYING = {
    *(Phase.ITERATION_START, Phase.TRAIN_PLAN, Phase.EVAL_DECISION, Phase.TRAIN_CONFIG),
    *(Phase.TRAIN_ROLLOUT, Phase.TRAIN_FILES_READY, Phase.ITERATION_END),
}
"""Phases whose flags have a document in a real iteration: of the master, and of all nodes."""


def run_empty_phase(
    node: Node,
    iteration: Iteration,
    phase: Phase,
    _act: Act | None = None,
    conclude: Conclude | None = None,
    before: Sequence[Beside] = (),  # by name, as run_phase has it: a name that it lacks is an error
    after: Sequence[Beside] = (),
) -> None:
    """Run the phase without its action; its flags, its waits and its payloads are real."""
    run_phase(node, iteration, phase, partial(_nothing, phase), _conclude if conclude else None)


def _nothing(phase: Phase, _node: Node, _iteration: Iteration) -> Payload:
    return {"resume_at": int(Phase.TRAIN_PLAN), "verifier": None} if phase in SAYING else {}


def _conclude(_node: Node, _iteration: Iteration, payloads: dict[int, Payload]) -> Payload:
    return {"heard": len(payloads)}


def run_node(root: Path, rank: int, options: argparse.Namespace) -> None:
    """Run one node, and print what it measured."""
    seconds: list[float] = []
    operations: dict[str, int] = {}
    calls = Calls()

    def iterate(node: Node) -> None:
        numbers = itertools.count(1)
        _follow_phases(run_phase if options.real else run_empty_phase, calls)
        before = files.operations.copy()
        for number in range(options.iterations + WARM_UP):
            if number == WARM_UP:
                before = files.operations.copy()
                calls.clear()
            started_s = time.perf_counter()
            calls.phase = BETWEEN
            iteration = node.next_iteration(
                number, open_when_ready if options.real else lambda _node: next(numbers)
            )
            assert iteration is not None
            main_loop.run_iteration(node, iteration)
            seconds.append(time.perf_counter() - started_s)
        calls.phase = AFTER
        operations.update(files.operations - before)

    settings: dict[str, Any] = {"cluster.num_nodes": options.nodes, "cluster.rejoin_timeout_s": 300}
    settings |= {**REAL, "iterations": options.iterations + WARM_UP} if options.real else {}
    request = StartRequest(root, rank, {} if rank else settings)
    start = (start_worker if rank else start_master)(request)
    code = run_to_exit_code(start, logs.set_up(rank), iterate)
    said = {"code": code, "seconds": seconds[WARM_UP:], "operations": operations}
    print(json.dumps({**said, "calls": calls.per_iteration(options.iterations)}))


def _follow_phases(run: Callable[..., None], calls: Calls) -> None:
    """Have `calls` know the phase that the node is in, which `run` runs."""

    def in_phase(node: Node, iteration: Iteration, phase: Phase, *conclude: Any, **more: Any) -> None:
        calls.phase = phase.label
        run(node, iteration, phase, *conclude, **more)

    main_loop.run_phase = in_phase


def main() -> None:
    """Start the nodes, wait for them, print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--phases", action="store_true", help="print a table of calls")
    parser.add_argument("--real", action="store_true", help="run real phases, not empty ones")
    parser.add_argument("--dir", type=Path, help="an empty directory")
    parser.add_argument("--dirs", help="one path of the same directory per node, separated by commas")
    parser.add_argument("--filesystem", metavar="KIND", help="serve this one, and mount it for each node")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_node(_roots(options)[options.rank].absolute(), options.rank, options)
        return
    if options.filesystem is not None:
        with _mounted(options.filesystem, options.nodes) as (inside, paths, seen):
            _measure(options, ["--dirs", ",".join(f"{path}/run" for path in paths)], inside, seen / "run")
        return
    roots = _roots(options)
    if len(roots) != options.nodes:
        parser.error(f"give --dir DIR, --filesystem KIND, or --dirs with {options.nodes} paths")
    _measure(options, [], (), roots[0])


def _roots(options: argparse.Namespace) -> list[Path]:
    given = options.dirs.split(",") if options.dirs else [options.dir] * options.nodes
    return [Path(root) for root in given if root]


@contextlib.contextmanager
def _mounted(kind: str, nodes: int) -> Iterator[tuple[Sequence[str], list[Path], Path]]:
    """Mount a filesystem for each node; gives what stands before the command of a node, where the nodes see
    it, and where this process does.
    """
    from tests.filesystems import Mounts, unavailable

    if reason := unavailable(kind):
        sys.exit(f"{kind}: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="flagpost-bench-") as folder,
        Mounts(kind, Path(folder, "fs"), nodes) as shared,
    ):
        yield shared.inside, [shared.path(node) for node in range(nodes)], shared.seen(0)


def _measure(options: argparse.Namespace, dirs: Sequence[str], inside: Sequence[str], root: Path) -> None:
    if not options.real:
        RunDir(root).base_model.mkdir(parents=True)  # there is no model to make
    command = [*inside, sys.executable, *sys.argv, *dirs, "--rank"]
    started = [
        subprocess.Popen([*command, f"{rank}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for rank in range(options.nodes)
    ]
    said = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in started]
    print(json.dumps(summary(said, options.iterations, RunDir(root))))
    if options.phases:
        print(table([BETWEEN, *(phase.label for phase in Phase)], said[0]["calls"], said[-1]["calls"]))


def summary(said: list[dict[str, Any]], iterations: int, run_dir: RunDir) -> dict[str, Any]:
    """Return the line; seconds are the master's, since a phase ends when its flag is raised."""
    seconds = said[0]["seconds"]
    phases = iterations * len(Phase)
    per_phase = [{name: count / phases for name, count in node["operations"].items()} for node in said]
    totals = [sum(node.values()) for node in per_phase]
    left = [path for directory in run_dir.protocol for path in directory.iterdir() if path.is_file()]
    return {
        "nodes": len(said),
        "iterations": iterations,
        "codes": sorted({node["code"] for node in said}),
        "seconds_median": round(statistics.median(seconds), 5),
        "seconds_p99": round(statistics.quantiles(seconds, n=100)[98], 5),
        "operations_master": round(totals[0], 2),
        "operations_worker": round(statistics.mean(totals[1:]), 2) if totals[1:] else None,
        "operations_worker_by_name": {name: round(count, 2) for name, count in sorted(per_phase[-1].items())},
        "bytes_left": sum(path.stat().st_size for path in left),
        "files_left": len(left),
    }


if __name__ == "__main__":
    main()
