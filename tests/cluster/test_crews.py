"""Two crews of real nodes: they come to what one crew comes to, whatever dies, and who need not end lives."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.directory import published
from coordinator.machine.children import FORKS
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from tests.cluster.cluster import FAST, Cluster, token_ids
from tests.cluster.faults import (
    ENGINE,
    TRAINER_RANK,
    children,
    lost_groups,
    repeated_groups,
    unsound_manifests,
)
from tests.cluster.test_changed_inputs import write_rewards
from tests.commands import run_forked
from trainer.job import launch

ITERATIONS, LEVEL = 6, 1
SETTINGS = (
    *FAST,
    "rollout.tasks_per_iteration=4",
    "eval.interval=3",
    "eval.max_tasks=2",
    "trainer.global_batch_size=8",
    "trainer.threads_per_process=1",
    "cluster.node_timeout_s=4",
    "--iterations",
    str(ITERATIONS),
    "--max-async-level",
    str(LEVEL),
)
PLACE = ("--place", "rollout=0-1", "--place", "train=2")


def outcome(cluster: Cluster) -> tuple[list[Any], str]:
    """The token ids of every slot of each iteration, and the digest of the last weights."""
    tokens = [token_ids(cluster.groups(iteration)) for iteration in range(1, ITERATIONS + 1)]
    return tokens, published.policy_of(cluster.run_dir, ITERATIONS).digest


@pytest.fixture(scope="module")
def replay(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """The serial replay: one crew of one node, which trains as the crew of one node does."""
    directory = tmp_path_factory.mktemp("replay")
    cluster = Cluster(directory / "run", cache, directory)
    assert cluster.run(1, *SETTINGS) == [0], cluster.everything_said()
    cluster.close()
    return outcome(cluster)


def start(cluster: Cluster, rank: int) -> None:
    cluster.start(rank, *(["--num-nodes", "3", *SETTINGS, *PLACE] if rank == 0 else []))


def end(cluster: Cluster, rank: int) -> None:
    """Kill a machine's process, and with it all that it has started."""
    cluster.kill(rank)
    cluster.nodes[rank].wait()


def policies(cluster: Cluster) -> list[int]:
    return [cluster.manifest(number)["origin"]["policy_iteration"] for number in range(1, ITERATIONS + 1)]


def test_two_crews_of_which_nodes_are_killed_at_random_end_with_the_bits_of_one(
    cluster: Cluster, replay: tuple[list[Any], str]
) -> None:
    chance = random.Random(18)
    for rank in range(3):
        start(cluster, rank)
    for progress in range(1, ITERATIONS):
        cluster.until(lambda at=progress: len(cluster.metrics()) >= at, f"iteration {progress}", 120)
        victims = chance.choice([[0], [1], [2], [0, 1], [0, 1, 2]])  # a master, a worker, a crew, all
        for rank in victims:
            end(cluster, rank)
        for rank in victims:
            start(cluster, rank)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    assert outcome(cluster) == replay
    assert policies(cluster) == [max(0, number - 1 - LEVEL) for number in range(1, ITERATIONS + 1)]
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert {line["kind"] for line in cluster.metrics()} == {"both"}
    assert not lost_groups(cluster.run_dir, {}) and not repeated_groups(cluster.run_dir)
    assert not unsound_manifests(cluster.run_dir)


def test_node_of_one_crew_dies_and_the_processes_of_the_other_live_on(cluster: Cluster) -> None:
    for rank in range(3):
        start(cluster, rank)

    def pids(rank: int, kind: str) -> set[int]:
        return {process.pid for process in children(cluster.nodes[rank].pid, kind)}

    trainer = cluster.until(lambda: pids(2, TRAINER_RANK), "the trainer")
    cluster.until(lambda: len(cluster.metrics()) >= 1, "iteration 1", 180)
    end(cluster, 1)
    cluster.until(
        lambda: "rollout rank 1 (" in cluster.output(0) and "is lost" in cluster.output(0), "the loss"
    )
    assert f"run --worker 1 --log-path {cluster.root}" in cluster.output(0)
    assert pids(2, TRAINER_RANK) == trainer
    start(cluster, 1)
    cluster.until(lambda: len(cluster.metrics()) >= 2, "iteration 2", 180)
    engines = {rank: cluster.until(lambda at=rank: pids(at, ENGINE), "an engine") for rank in (0, 1)}
    assert pids(2, TRAINER_RANK) == trainer
    end(cluster, 2)
    cluster.until(lambda: "holding: the train crew (led by rank 2, " in cluster.output(0), "the loss")
    assert f"run --worker 2 --log-path {cluster.root}" in cluster.output(0)
    start(cluster, 2)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    said = [cluster.output(rank) for rank in (0, 1)]
    pids_of = [pid for of in engines.values() for pid in of]
    cluster.until(lambda: not any(map(psutil.pid_exists, pids_of)), "the end of the engines", 60)
    assert "the train crew (led by rank 2, " in said[0] and " is back" in said[0]
    assert cluster.output(2).count("Traceback") == 0


def test_crew_that_holds_ends_at_once_when_the_run_is_interrupted(cluster: Cluster) -> None:
    """Its worker too, which has no master."""
    dead, living = 1, 2
    cluster.start(0, "--num-nodes", "3", *SETTINGS, "--place", "train=0", "--place", "rollout=1-2")
    for rank in (1, 2):
        start(cluster, rank)
    cluster.until(lambda: len(cluster.metrics()) >= 1, "iteration 1", 120)
    end(cluster, dead)
    cluster.until(lambda: f"rollout rank {dead} (" in cluster.output(living), "the loss", 120)
    cluster.kill(0, signal.SIGINT)
    codes = cluster.wait()
    assert codes[0] == codes[living] == Exit.INTERRUPTED
    assert "the train crew has ended: train rank 0 (" in cluster.output(living)
    assert "was interrupted by SIGINT" in cluster.output(living)


def test_crew_that_lives_does_not_go_on_with_code_that_the_master_has_replaced(
    cluster: Cluster, tmp_path: Path
) -> None:
    def begin(rank: int, value: str) -> None:
        given = [*SETTINGS, "--place", "train=0", "--place", "rollout=1", "--accept-code-change"]
        given += ["--num-nodes", "2", "rollout.reward=my_rewards:score"]
        cluster.start(rank, *(() if rank else given), prefix=write_rewards(tmp_path / "code", value))

    begin(0, "1.0")
    begin(1, "1.0")
    cluster.until(lambda: len(cluster.metrics()) >= 1, "iteration 1", 120)
    end(cluster, 0)
    begin(0, "2.0")
    assert cluster.wait() == [Exit.FAILED, Exit.FAILED]
    said = cluster.output(0)
    assert "the rollout crew has ended: rollout rank 1 (" in said
    assert "--reward my_rewards:score is not the same on " in said


def test_machine_whose_devices_are_divided_has_a_node_in_each_crew(
    cluster: Cluster, replay: tuple[list[Any], str], tmp_path: Path
) -> None:
    cluster.environment["CUDA_VISIBLE_DEVICES"] = "3,5"
    del cluster.environment[FORKS]
    # There are no such devices here, and a rank would refuse to compute without them.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import os\nos.environ.pop({launch.GPUS!r}, None)\n")
    cluster.environment["PYTHONPATH"] = str(tmp_path / "site")
    cluster.start(0, *SETTINGS, "--place", "rollout=0", "--place", "train=1", "engine.kind=torch")
    master = cluster.nodes[0].pid
    cluster.until(lambda: len(children(master, "--crew ")) == 2, "both nodes")
    nodes = children(master, "--crew ")
    seen = {process.environ()["CUDA_VISIBLE_DEVICES"] for process in nodes}
    killed = next(process for process in nodes if "train" in process.cmdline())
    cluster.until(lambda: len(cluster.metrics()) >= 1, "iteration 1", 180)
    killed.send_signal(signal.SIGKILL)
    assert cluster.wait() == [0], cluster.everything_said()
    assert seen == {"3", "5"}
    assert "the train node of this machine was killed (signal 9): starting it again" in cluster.output(0)
    assert outcome(cluster) == replay


def test_devices_are_placed_anew_at_a_start_and_living_workers_follow(
    cluster: Cluster, replay: tuple[list[Any], str]
) -> None:
    def begin(*place: str) -> None:
        cluster.start(0, "--num-nodes", "3", *SETTINGS, *place)

    begin()
    for rank in (1, 2):
        start(cluster, rank)
    cluster.until(lambda: len(cluster.metrics()) >= 1, "iteration 1", 180)
    end(cluster, 0)
    begin(*PLACE)
    cluster.until(lambda: len(cluster.metrics()) >= 3, "iteration 3", 180)
    end(cluster, 0)
    begin("--reset-settings", "cluster.place")
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, ITERATIONS + 1))
    assert policies(cluster) == [0, 0, 1, 2, 3, 4]
    assert outcome(cluster)[0][:2] == replay[0][:2]  # the same seeds; later ones depend on how it was trained


def test_devices_are_placed_anew_by_a_start_of_all_nodes_together(cluster: Cluster) -> None:
    """Workers find the crews of the last start, the master replaces them, and a worker's nodes come later."""
    places = [PLACE, ("--place", "train=0", "--place", "rollout=1-2")]
    for number, place in enumerate(places, start=1):
        codes = cluster.run(3, *SETTINGS, *place, "--iterations", str(number))
        assert codes == [0, 0, 0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics()] == [1, 2]
    said = cluster.everything_said()
    assert "no such crew" not in said and "Traceback" not in said and "error: " not in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "there is no device 1; the machines have 1 device"),
        (("--rl-phase", "update"), "leave one out"),
        (("--expect-gpus", "2"), "leave it out"),
    ],
)
def test_what_cannot_be_placed_is_one_line_and_nothing_is_written(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    words = ("--log-path", "run", *FAST, "--place", "rollout=0", "--place", "train=1", *arguments)
    ended = run_forked(words, tmp_path, os.environ)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and expected in line
    assert not (tmp_path / "run").exists()


def test_worker_of_a_placed_run_that_the_run_does_not_have_is_refused(cluster: Cluster) -> None:
    placement_records.publish_placement(
        cluster.root, placement_records.Placement(2, ("rollout=0", "train=1"))
    )
    cluster.start(3)
    assert cluster.wait() == [2]
    assert "--worker 3 is outside the master's --num-nodes 2" in cluster.output(3)
