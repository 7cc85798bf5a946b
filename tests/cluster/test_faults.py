"""What ends a run early: how fast, with which exit code and words, and what a second start makes of it."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster import FAST, Cluster, token_ids

QUICK = (
    "cluster.node_timeout_s=4",
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.concurrency=4",
)
"""Losses are found in seconds, and a rollout lasts long enough to be hit."""


def parts(cluster: Cluster, rank: int) -> list[Path]:
    return sorted(cluster.run_dir.trajectories("train", 1).glob(f"r{rank:04d}.*.safetensors"))


def start_rollout(cluster: Cluster, engine_url: str, nodes: int) -> tuple[str, ...]:
    """Start a rollout that can be hit, and wait until its last rank has published a part."""
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    arguments = ("--num-nodes", str(nodes), *arguments, "rollout.tasks_per_iteration=24")
    cluster.start(0, *arguments)
    for rank in range(1, nodes):
        cluster.start(rank)
    cluster.until(lambda: parts(cluster, nodes - 1), "the first part")
    return arguments


def test_killed_worker_ends_all_and_a_restart_generates_only_the_rest(
    cluster: Cluster, engine_url: str, tmp_path: Path, cache: Path
) -> None:
    arguments = start_rollout(cluster, engine_url, 3)
    cluster.kill(2)
    killed_s = time.monotonic()
    codes = cluster.wait(60)
    assert codes == [3, 3, -signal.SIGKILL]
    assert time.monotonic() - killed_s < 4 + 2 * 0.3 + 10
    for rank in (0, 1):
        last = cluster.output(rank).splitlines()[-1]
        assert re.search(r"rank 2 \(.+; last seen in train_rollout, iteration 1, \d+/8\) is lost", last), last
        assert "run --worker 2 --log-path" in last
    kept = {
        path.name: path.read_bytes()
        for path in cluster.run_dir.trajectories("train", 1).glob("*.safetensors")
    }
    assert kept

    cluster.start(0, *arguments)
    for rank in (1, 2):
        cluster.start(rank)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    entries = cluster.manifest(1)["parts"]
    assert {entry["file"] for entry in entries} >= set(kept), "finished groups count"
    assert sorted(slot for entry in entries for slot in entry["slots"]) == list(range(24))
    for name, data in kept.items():
        assert (cluster.run_dir.trajectories("train", 1) / name).read_bytes() == data

    calm = Cluster(tmp_path / "calm", cache, tmp_path / "calm-logs")
    (tmp_path / "calm-logs").mkdir()
    try:
        assert calm.run(1, *arguments[2:]) == [0]
        assert token_ids(calm.groups(1)) == token_ids(cluster.groups(1))
    finally:
        calm.close()


def test_killed_master_ends_the_workers(cluster: Cluster, engine_url: str) -> None:
    start_rollout(cluster, engine_url, 2)
    cluster.kill(0)
    assert cluster.wait(60) == [-signal.SIGKILL, 3]
    assert re.search(r"rank 0 \(.+\) is lost", cluster.output(1).splitlines()[-1])


def test_interrupt_of_the_master_stops_all(cluster: Cluster, engine_url: str) -> None:
    arguments = start_rollout(cluster, engine_url, 2)
    cluster.kill(0, signal.SIGINT)
    assert cluster.wait(20) == [130, 130]
    assert "interrupted by SIGINT" in cluster.output(1).splitlines()[-1]
    cluster.start(0, *arguments)
    cluster.start(1)
    assert cluster.wait() == [0, 0]


def test_terminated_worker_is_lost_at_once(cluster: Cluster, engine_url: str) -> None:
    start_rollout(cluster, engine_url, 2)
    cluster.kill(1, signal.SIGTERM)
    started_s = time.monotonic()
    assert cluster.wait(20) == [3, 130]
    assert time.monotonic() - started_s < 4
    assert "interrupted by SIGTERM" in cluster.output(0).splitlines()[-1]


def test_error_on_one_node_ends_all_with_its_words(cluster: Cluster) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--iterations", "1", "--engine-url", "http://127.0.0.1:9")
    codes = cluster.run(2, *arguments, "engine.start_timeout_s=1")
    assert codes == [1, 1]
    for rank in (0, 1):
        last = cluster.output(rank).splitlines()[-1]
        assert re.search(r"rank [01] \(.+\) failed in train_rollout, iteration 1: .*127\.0\.0\.1:9", last), (
            last
        )


def test_killed_trainer_ends_all_with_its_rank(cluster: Cluster) -> None:
    cluster.start(0, *FAST, "--num-nodes", "2", "--iterations", "50", "cluster.node_timeout_s=20")
    cluster.start(1)
    cluster.until(lambda: len(cluster.metrics()) >= 1, "the first iteration", 120)
    agents = [
        process
        for process in psutil.Process(cluster.nodes[1].pid).children(recursive=True)
        if "torch.distributed.run" in " ".join(process.cmdline())
    ]
    agents[0].kill()
    assert cluster.wait(90) == [1, 1], cluster.everything_said()
    for rank in (0, 1):
        assert "rank 1" in cluster.output(rank).splitlines()[-1], cluster.everything_said()


def test_restarted_worker_is_taken_in_and_the_run_goes_on(cluster: Cluster, engine_url: str) -> None:
    start_rollout(cluster, engine_url, 2)
    cluster.kill(1)
    cluster.nodes[1].wait()
    cluster.start(1)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert sorted(cluster.groups(1)) == list(range(24))


def test_newest_process_of_a_rank_wins(cluster: Cluster, engine_url: str) -> None:
    arguments = start_rollout(cluster, engine_url, 2)
    old = dict(cluster.nodes)
    cluster.start(1)
    assert old[1].wait(30) == 4
    assert "was taken over by incarnation 2" in cluster.output(1)
    cluster.start(0, *arguments)
    assert old[0].wait(30) == 4
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert sorted(cluster.groups(1)) == list(range(24))


def test_killed_parent_takes_its_nodes_and_their_engines_along(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--engine-url", engine_url, "--num-nodes", "2")
    parent = cluster.start(0, *arguments, "rollout.tasks_per_iteration=500", role=["local"])
    cluster.until(lambda: parts(cluster, 1), "the first part")
    parent.kill()
    parent.wait()
    cluster.until(lambda: not cluster.left_behind(), "the end of all processes", 10)


@pytest.mark.parametrize(
    ("option", "value"), [("--iterations", "7"), ("--num-nodes", "3"), ("--reward", "numeric")]
)
def test_contradicting_worker_is_refused(cluster: Cluster, engine_url: str, option: str, value: str) -> None:
    cluster.start(
        0, *FAST, "--num-nodes", "2", "--rl-phase", "rollout", "--iterations", "5", "--engine-url", engine_url
    )
    cluster.until(lambda: list(cluster.run_dir.protocol.glob("*.epoch.json")), "the lobby")
    before = {path.name for path in cluster.run_dir.protocol.iterdir() if ".r0001." in path.name}
    worker = cluster.start(1, option, value)
    assert worker.wait(30) == 2
    (line,) = cluster.output(1).splitlines()[1:]
    assert option in line and value in line and "master" in line
    assert {path.name for path in cluster.run_dir.protocol.iterdir() if ".r0001." in path.name} == before


def test_worker_outside_the_range_is_refused(cluster: Cluster, engine_url: str) -> None:
    cluster.start(0, *FAST, "--num-nodes", "2", "--rl-phase", "rollout", "--engine-url", engine_url)
    worker = cluster.start(5)
    assert worker.wait(30) == 2
    assert "--worker 5 is outside the master's --num-nodes 2" in cluster.output(5)


def test_changed_model_tasks_or_seed_are_refused(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    assert cluster.run(1, *arguments) == [0]
    for change in ("rollout.seed=5", "tiny.warmup_steps=1"):
        assert cluster.run(1, *arguments, change) == [2]
        assert "use another log path" in cluster.output(0).splitlines()[-1]
