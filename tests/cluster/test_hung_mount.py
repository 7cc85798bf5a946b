"""Nodes whose mount hangs are interrupted: their engines go at once, and they themselves once it answers."""

import signal
import time
from pathlib import Path

import psutil

from coordinator.directory.file_names import Flag
from coordinator.protocol.phase import Phase
from tests.cluster.cluster import FAST
from tests.cluster.test_shared_filesystem import mounted
from tests.processes import is_schedulable

ARGUMENTS = (
    *FAST,
    "--rl-phase=rollout",
    "--iterations=1",
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.tasks_per_iteration=64",
    "rollout.concurrency=1",
)


def engine_of(node: int) -> int:
    children = psutil.Process(node).children()
    (engine,) = [child for child in children if "rollout.engines.embedded" in " ".join(child.cmdline())]
    return engine.pid


def test_interrupted_nodes_end_their_engines_at_once_and_themselves_when_the_mount_answers(
    tmp_path: Path, cache: Path
) -> None:
    with mounted(tmp_path, cache, 2) as nodes:
        nodes.start(*ARGUMENTS, "--rank-weights=31,1")
        finished = nodes.cluster.run_dir.entry(Flag(2, 1, Phase.TRAIN_ROLLOUT, 1, "ok.json"))
        nodes.cluster.until(finished.exists, "rank 1 has finished its share", 120)
        started = [nodes.cluster.nodes[rank] for rank in (0, 1)]
        engines = [engine_of(node.pid) for node in started]
        nodes.shared.freeze()
        where = Path(f"/proc/{started[1].pid}/wchan")
        nodes.cluster.until(lambda: "request_wait" in where.read_text(), "rank 1 waits in a call")
        started[0].send_signal(signal.SIGINT)  # its main thread generates
        started[1].send_signal(signal.SIGTERM)
        nodes.cluster.until(lambda: not any(map(is_schedulable, engines)), "the engines end")
        nodes.cluster.until(lambda: nodes.said().count("does not answer: ") == 2, "it is said")
        time.sleep(1.0)
        assert [node.poll() for node in started] == [None, None]
        for rank, name in enumerate(("SIGINT", "SIGTERM")):
            (line,) = [line for line in nodes.cluster.output(rank).splitlines() if "not answer: " in line]
            assert f"was interrupted by {name} in train_rollout, iteration 1, but" in line
            assert f"{nodes.shared[rank].path}/run/" in line
            assert line.endswith("; the process itself goes as soon as the mount answers")
        nodes.shared.thaw()
        assert nodes.cluster.wait(120) == [130, 130], nodes.said()


def test_nodes_that_claim_while_the_mount_hangs_end_as_soon_as_it_answers(
    tmp_path: Path, cache: Path
) -> None:
    with mounted(tmp_path, cache, 2) as nodes:
        nodes.start(*ARGUMENTS, "rollout.part_interval_s=0.2")
        claims = nodes.cluster.run_dir.claims
        nodes.cluster.until(lambda: claims.is_dir() and len(list(claims.iterdir())) > 4, "claims", 120)
        started = [nodes.cluster.nodes[rank] for rank in (0, 1)]
        engines = [engine_of(node.pid) for node in started]
        nodes.shared.freeze()
        time.sleep(3.0)  # so long that each node wants another chunk, or writes a part
        started[0].send_signal(signal.SIGINT)
        started[1].send_signal(signal.SIGTERM)
        nodes.cluster.until(lambda: not any(map(is_schedulable, engines)), "the engines end")
        nodes.shared.thaw()
        assert nodes.cluster.wait(120) == [130, 130], nodes.said()
