"""--expect-gpus: the run ends before work starts where GPUs are missing, and says on which node."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.node import identity
from coordinator.node.gathering import gpu_shortfall
from coordinator.protocol.exits import Exit
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.loading import build, contradictions, overlay
from coordinator.settings.tree import SettingsError
from tests.simulation.world import World

HOSTS = {0: "node-a", 1: "node-b", 2: "node-c"}


def cluster(expect: Any, **more: Any) -> ClusterSettings:
    given = {"cluster.num_nodes": 3, "cluster.expect_gpus": expect}
    return build(given | {f"cluster.{key}": value for key, value in more.items()}).cluster


def shortfall(settings: ClusterSettings, *counts: int | None) -> str | None:
    """With so many GPUs on each rank; None: it is no member."""
    found = {rank: count for rank, count in enumerate(counts) if count is not None}
    return gpu_shortfall(settings, found, HOSTS)


@pytest.mark.parametrize(
    ("typed", "held"), [("32", (32,)), (32, (32,)), ("8, 4,4", (8, 4, 4)), ([8, 4, 0], (8, 4, 0))]
)
def test_total_or_one_number_a_node(typed: Any, held: tuple[int, ...]) -> None:
    settings = build({"cluster.num_nodes": 3, "cluster.expect_gpus": typed})
    assert settings.cluster.expect_gpus == held
    assert overlay(settings, {}) == settings, "as a worker reads it"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("8,8", "8,8 has 2 numbers for --num-nodes 3; give the total, e.g. 24, or one per node, e.g. 8,8,8"),
        ("8,x,8", "--expect-gpus 8,x,8: 'x' is not a number of GPUs; give the total, e.g. 32"),
        ("-1", "--expect-gpus -1: '-1' is not a number of GPUs"),
        (-1, "--expect-gpus"),
        ([], "has 0 numbers"),
    ],
)  # fmt: skip
def test_bad_numbers_are_refused_in_one_line(typed: Any, expected: str) -> None:
    with pytest.raises(SettingsError) as refused:
        cluster(typed)
    assert str(refused.value).startswith("--expect-gpus") and expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_worker_may_say_the_same_and_nothing_else() -> None:
    published = build({"cluster.num_nodes": 3, "cluster.expect_gpus": "8,4,4"})
    assert contradictions(published, {"cluster.expect_gpus": "8,4,4"}) == []
    assert contradictions(published, {"cluster.expect_gpus": "16"}) == [
        "--expect-gpus is 16 here, but the master published 8,4,4"
    ]


def test_nothing_is_expected_unless_asked_for() -> None:
    assert gpu_shortfall(build({"cluster.num_nodes": 3}).cluster, {0: 0, 1: 0, 2: 0}, HOSTS) is None


def test_total_names_the_nodes_that_have_less_than_their_share() -> None:
    assert shortfall(cluster(24), 8, 8, 8) is None
    assert shortfall(cluster(24), 4, 8, 12) is None, "one makes up for another"
    assert shortfall(cluster(24), 8, 7, 8) == (
        "--expect-gpus 24, but there are 23 GPUs (rank 0: 8, rank 1: 7, rank 2: 8): "
        "rank 1 (node-b) has 7 of 8; look at nvidia-smi and CUDA_VISIBLE_DEVICES there, or expect fewer"
    )
    text = shortfall(cluster(24), 9, 6, 0) or ""
    assert "rank 1 (node-b) has 6 of 8; rank 2 (node-c) has 0 of 8;" in text and "node-a" not in text


def test_share_of_a_total_follows_the_weights() -> None:
    settings = cluster(16, rank_weights="2,1,1")
    assert shortfall(settings, 8, 4, 4) is None
    text = shortfall(settings, 6, 4, 4) or ""
    assert "rank 0 (node-a) has 6 of 8;" in text and "node-b" not in text


def test_of_one_number_a_node_none_makes_up_for_another() -> None:
    assert shortfall(cluster("8,4,4"), 8, 5, 4) is None
    text = shortfall(cluster("8,4,4"), 12, 4, 3) or ""
    assert "--expect-gpus 8,4,4, but there are 19 GPUs" in text and "): rank 2 (node-c) has 3 of 4;" in text


def test_it_holds_for_the_members_where_others_are_left_out() -> None:
    for settings in (cluster(24), cluster("8,8,8")):
        assert shortfall(settings, 8, None, 8) is None
        assert "rank 2 (node-c) has 7 of 8;" in (shortfall(settings, 8, None, 7) or "")


@pytest.mark.parametrize(
    ("expected", "counts", "words"),
    [
        ("24", (8, 8, 8), ""),
        ("24", (8, 7, 8), "has 7 of 8"),
        (None, (8, 7, 8), ""),
        (None, (8, 0, 8), "lacks them; look at nvidia-smi"),
    ],
)
def test_run_with_too_few_ends_on_all_nodes_before_an_engine_starts(
    tmp_path: Path, expected: str | None, counts: tuple[int, ...], words: str
) -> None:
    given = {"cluster.expect_gpus": expected} if expected else {}
    world = World(tmp_path, 3, 0, {**given, "iterations": 1})
    world.allowed = {Exit.DONE, Exit.FAILED}

    def count() -> int:
        return counts[int(world.scheduler.process.host.split("-")[1])]

    world.patches.append(lambda patch: patch.setattr(identity, "count_gpus", count))

    def over() -> bool:
        if len(world.processes) == 3 and not any(process.lives for process in world.processes):
            world.scheduler.end()
        return False

    world.run(over)
    assert world.scheduler.violation is None
    codes = {process.rank: process.code for process in world.processes}
    said = [line for line in world.said if "rank 1 (host-1-" in line and words in line]
    if not words:
        said = []
        assert (codes, said) == ({0: 0, 1: 0, 2: 0}, []) and world.machines.children
    else:
        assert codes == {0: 1, 1: 1, 2: 1} and world.machines.children == []
        assert len(said) == 3, "every node says it"
