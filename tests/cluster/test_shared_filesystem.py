"""Runs of two nodes, each with a mount of its own, over a filesystem that misbehaves."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.layout import GUESTS
from rollout.storage.delta import delta_name
from tests.cluster.cluster import FAST, Cluster, token_ids
from tests.cluster.faults import AGENT, TRAINER_RANK, children
from tests.faultfs import FaultFs, unavailable
from tests.processes import is_schedulable

FAULTS: dict[str, dict[str, Any]] = {
    "stale attributes, absences and listings": {"attributes_s": 1.0, "negative_s": 1.0, "listing_s": 1.0},
    "late publication, errors that pass, calls that lie": {
        "publishes_s": 0.5,
        "error_rate": 0.02,
        "lie_rate": 0.05,
        "lies": ("rename", "link", "create", "mkdir", "write", "fsync"),
    },
}
SLOW = (
    "cluster.node_timeout_s=4",
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.concurrency=4",
    "rollout.tasks_per_iteration=24",
    "--rank-weights",
    "1,1",
)
"""A rollout that lasts long enough to be hit, and a timeout that a test can outwait. Each node has its share:
one that is slow to start would claim nothing.
"""


@dataclass
class Nodes:
    """The nodes of a run, and what lies below them."""

    shared: FaultFs
    cluster: Cluster

    def start(self, *arguments: str) -> None:
        """Start all, each on its own mount; the master with `arguments`."""
        for rank, mount in enumerate(self.shared.mounts):
            given = () if rank else ("--num-nodes", f"{len(self.shared.mounts)}", *arguments)
            self.cluster.start(rank, *given, root=mount.path / "run")

    def parts(self, rank: int, iteration: int = 1) -> list[Path]:
        """The parts that `rank` has published."""
        return sorted(
            self.cluster.run_dir.trajectories("train", iteration).glob(f"r{rank:04d}.*.safetensors")
        )

    def said(self) -> str:
        return self.cluster.everything_said()


@pytest.fixture
def nodes(tmp_path: Path, cache: Path) -> Iterator[Nodes]:
    with mounted(tmp_path, cache, 2) as nodes:
        yield nodes


@contextmanager
def mounted(tmp_path: Path, cache: Path, number: int) -> Iterator[Nodes]:
    """A cluster of `number` nodes with a mount each; its processes are ended, and its mounts removed."""
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", number) as shared:
        cluster = Cluster(shared.backing / "run", cache, tmp_path)
        try:
            yield Nodes(shared, cluster)
        finally:
            shared.thaw()
            cluster.close()


def rollout(engine_url: str, *more: str, iterations: int = 3) -> tuple[str, ...]:
    arguments = ("--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", f"{iterations}")
    return (*FAST, *arguments, *more)


@pytest.fixture(scope="module")
def calm(
    cache: Path, engine_url: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[int, list[list[int]]]]:
    """The token ids of an undisturbed rollout, by iteration and slot."""
    folder = tmp_path_factory.mktemp("calm")
    cluster = Cluster(folder / "run", cache, folder)
    try:
        assert cluster.run(1, *rollout(engine_url)) == [0], cluster.everything_said()
        return {iteration: token_ids(cluster.groups(iteration)) for iteration in (1, 2, 3)}
    finally:
        cluster.close()


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_rollout_ends_with_the_same_trajectories(
    nodes: Nodes, engine_url: str, calm: dict[int, dict[int, list[list[int]]]], faults: dict[str, Any]
) -> None:
    nodes.shared.set(**faults)
    nodes.start(*rollout(engine_url))
    assert nodes.cluster.wait() == [0, 0], nodes.said()
    assert "is lost" not in nodes.said()
    for iteration in (1, 2, 3):
        assert token_ids(nodes.cluster.groups(iteration)) == calm[iteration]
    assert [line["iteration"] for line in nodes.cluster.metrics()] == [1, 2, 3]


def test_guest_helps_on_a_filesystem_with_all_of_it(
    nodes: Nodes, engine_url: str, calm: dict[int, dict[int, list[list[int]]]]
) -> None:
    for faults in FAULTS.values():
        nodes.shared.set(**faults)
    cluster, (here, there) = nodes.cluster, nodes.shared.mounts
    slow = ("rollout.environment=tests.cluster.plugins:slow", "rollout.concurrency=1")
    cluster.start(0, *rollout(engine_url), *slow, root=here.path / "run")
    cluster.start(GUESTS, "--name", "guest", role=["guest"], root=there.path / "run")
    assert cluster.wait() == [0, 0], nodes.said()
    makers = [{part["rank"] for part in cluster.manifest(number)["parts"]} for number in (1, 2, 3)]
    assert {0, GUESTS} == set().union(*makers), nodes.said()
    for iteration in (1, 2, 3):
        assert token_ids(cluster.groups(iteration)) == calm[iteration]


def test_training_goes_through_on_a_filesystem_with_all_of_it(nodes: Nodes) -> None:
    nodes.shared.set(attributes_s=3.0, negative_s=3.0, no_links="EPERM", halves_s=0.02, clock_offset_s=3600.0)
    # Errors where the nodes meet, and lies of renames: what loads and saves models tries it all only once.
    nodes.shared.set(lie_rate=0.05, lies=("rename",), error_rate=0.02, errors_below="/run/protocol")
    nodes.start(*FAST, "--iterations", "3", "--eval-interval", "2")
    assert nodes.cluster.wait() == [0, 0], nodes.said()
    assert [line["iteration"] for line in nodes.cluster.metrics()] == [1, 2, 3]


def test_three_nodes_train_from_files_on_a_filesystem_where_every_call_may_fail(
    tmp_path: Path, cache: Path, random_model: Path
) -> None:
    with mounted(tmp_path, cache, 3) as nodes:
        shutil.copytree(random_model, nodes.shared.backing / "model")
        task = {"prompt": "12+34=", "answer": "64"}
        (nodes.shared.backing / "tasks.jsonl").write_text(f"{json.dumps(task)}\n")
        local = tmp_path / "local"
        local.mkdir()
        model, tasks = (nodes.shared[0].path / name for name in ("model", "tasks.jsonl"))
        nodes.shared.set(error_rate=0.03, errors=("EIO", "ESTALE"))
        inputs = ("--model", f"{model}", "--tasks", f"{tasks}", "--iterations", "2", "trainer.kl=k3")
        deltas = ("checkpoints.delta=true", "trainer.compute_dtype=bfloat16", "trainer.learning_rate=1e-6")
        nodes.start(*FAST, *inputs, *deltas, f"cluster.local_dir={local}")
        assert nodes.cluster.wait() == [0, 0, 0], nodes.said()
        nodes.shared.set(error_rate=0.0)
        # A trainer that was started again between the two iterations has none: it does not know the first.
        has_delta = (nodes.cluster.run_dir.checkpoint(2) / delta_name("model.safetensors")).exists()
        assert ("GB by a delta)" in nodes.said()) == has_delta, nodes.said()
        assert "is of no use" not in nodes.said(), nodes.said()
        assert [line["iteration"] for line in nodes.cluster.metrics()] == [1, 2]
        assert json.loads(nodes.cluster.run_dir.run_json.read_text())["fixed"]["model"]["name"] == f"{model}"


def test_disk_that_stays_full_ends_the_run_and_the_same_command_resumes_it(
    nodes: Nodes, engine_url: str
) -> None:
    arguments = rollout(engine_url, *SLOW, iterations=1)
    nodes.start(*arguments, "cluster.rejoin_timeout_s=6")
    nodes.cluster.until(lambda: nodes.parts(0) and nodes.parts(1), "the first parts")
    nodes.shared.set(full=True)
    assert nodes.cluster.wait(120) == [3, 3], nodes.said()
    for rank in (0, 1):
        last = nodes.cluster.output(rank).splitlines()[-1]
        path = re.escape(str(nodes.shared[rank].path / "run"))
        full = (
            rf"cannot write {path}/\S+: No space left on device .*\(0\.0 of [\d.]+ GB free\); free some space"
        )
        assert re.search(full, last) and "run --" in last, last
    kept = {path: path.read_bytes() for rank in (0, 1) for path in nodes.parts(rank)}

    nodes.shared.set(full=False)
    nodes.start(*arguments)
    assert nodes.cluster.wait() == [0, 0], nodes.said()
    assert sorted(nodes.cluster.groups(1)) == list(range(24))
    assert {path.name for path in kept} <= {entry["file"] for entry in nodes.cluster.manifest(1)["parts"]}
    assert all(path.read_bytes() == data for path, data in kept.items())


def test_what_is_over_its_quota_is_waited_for(nodes: Nodes) -> None:
    """The samples of an iteration, then what is trained from them, then the checkpoint."""
    folders = ("train_trajectories", "batches", "checkpoints")
    nodes.shared.set(full=True, full_below=f"/run/{folders[0]}/")
    nodes.start(*FAST, "--iterations", "1", "--eval-interval", "0", "cluster.node_timeout_s=5")
    for folder, following in zip(folders, (*folders[1:], None), strict=True):
        wait = rf"waiting for free space.*/run/{folder}/|/run/{folder}/.*waiting for free space"
        nodes.cluster.until(lambda wait=wait: re.search(wait, nodes.said()), f"a wait for {folder}", 120)
        time.sleep(6)  # longer than node_timeout
        if following:
            nodes.shared.set(full_below=f"/run/{following}/")
    nodes.shared.set(full=False)
    assert nodes.cluster.wait() == [0, 0], nodes.said()
    assert "is lost" not in nodes.said() and "attempt 2" not in nodes.said()
    epochs = [name for name in os.listdir(nodes.cluster.run_dir.master) if name.endswith(".epoch.json")]
    assert sorted(epochs) == ["e0001.epoch.json", "e0002.epoch.json", "e0003.epoch.json"], nodes.said()


def test_nodes_go_on_by_themselves_after_whatever_happened_to_their_mounts(
    nodes: Nodes, engine_url: str
) -> None:
    """One trouble in each iteration: a stall for all, a frozen mount, one that is read-only, a full disk."""
    nodes.start(*rollout(engine_url, *SLOW, iterations=4))
    started = [nodes.cluster.nodes[rank] for rank in (0, 1)]
    kept: dict[Path, bytes] = {}
    before = [0, 0]

    def begin(iteration: int) -> None:
        """Wait until both have published something of an iteration."""
        ranks = (0, 1)
        nodes.cluster.until(
            lambda: all(nodes.parts(rank, iteration) for rank in ranks), f"parts of iteration {iteration}"
        )
        kept.update({path: path.read_bytes() for rank in ranks for path in nodes.parts(rank, iteration)})
        before[:] = [len(nodes.cluster.output(rank)) for rank in ranks]

    def says(rank: int, words: str) -> bool:
        """Whether a node has said that in this iteration."""
        return bool(re.search(words, nodes.cluster.output(rank)[before[rank] :]))

    def fences_itself(rank: int) -> bool:
        return says(rank, "it leaves the epoch, its engine stays warm")

    begin(1)
    nodes.shared.freeze()
    time.sleep(12)  # three times node_timeout
    nodes.shared.thaw()

    begin(2)
    assert "is lost" not in nodes.said()
    nodes.shared[0].freeze()
    nodes.cluster.until(lambda: fences_itself(0), "rank 0 fences itself")
    nodes.cluster.until(lambda: says(1, r"holding: rank 0 \(.*is lost"), "the worker finds it lost")
    nodes.shared[0].thaw()

    begin(3)
    nodes.shared[1].set(read_only=True)
    nodes.cluster.until(lambda: fences_itself(1), "rank 1 fences itself")
    nodes.cluster.until(lambda: says(0, r"rank 1 \(.*is lost"), "the master finds it lost")
    nodes.shared[1].set(read_only=False)

    begin(4)
    nodes.shared.set(full=True)
    nodes.cluster.until(lambda: fences_itself(0) and fences_itself(1), "the fences")
    assert all(says(rank, r"No space left on device \(0\.0 of") for rank in (0, 1))
    assert [node.poll() for node in started] == [None, None], nodes.said()
    nodes.shared.set(full=False)

    assert nodes.cluster.wait() == [0, 0], nodes.said()
    for iteration in range(1, 5):
        assert sorted(nodes.cluster.groups(iteration)) == list(range(24))
    assert all(path.read_bytes() == data for path, data in kept.items())


def lost(nodes: Nodes, rank: int) -> str:
    """The line in which `rank` says who is lost."""
    return next((line for line in nodes.cluster.output(rank).splitlines() if "is lost" in line), "")


def test_trainer_of_a_node_without_its_mount_is_stopped(nodes: Nodes, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{k}+1=", "chosen": f"{k + 1}", "rejected": f"({k + 1})"} for k in range(10, 90)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    training = ("--tasks", f"{tmp_path / 'pairs.jsonl'}", "trainer.algorithm=dpo")  # which needs no engine
    nodes.start(*FAST, *training, "--iterations", "5", "cluster.node_timeout_s=4")
    nodes.cluster.until(lambda: nodes.cluster.metrics(), "the first iteration", 120)
    node = nodes.cluster.nodes[1].pid
    job = [*nodes.cluster.until(lambda: children(node, TRAINER_RANK), "a trainer"), *children(node, AGENT)]
    nodes.shared[1].freeze()
    nodes.cluster.until(lambda: not any(map(is_schedulable, (each.pid for each in job))), "its trainer ends")
    nodes.cluster.until(lambda: "rank 1" in lost(nodes, 0), "the master finds it lost")
    nodes.shared[1].thaw()
    assert nodes.cluster.wait() == [0, 0], nodes.said()
    assert [line["iteration"] for line in nodes.cluster.metrics()] == list(range(1, 6))
