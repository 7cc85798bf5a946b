"""Who generates what: shares and spare slots by weight, and how much of them is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.history import History
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.parts import PartWriter
from coordinator.node.iteration import Iteration
from coordinator.phases import rollout_steps
from coordinator.phases.collecting import key_of
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from rollout.collect import AllGivenUp
from rollout.quota import Quota
from rollout.storage import files
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN, POLICY, group, tombstone


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """As much of a node as planning looks at: three members of the weights 2, 1 and 1."""
    run_dir = RunDir(tmp_path)
    files.make_directory(run_dir.trajectories("train", 1))
    members = {rank: SimpleNamespace(weight=2.0 if rank == 0 else 1.0) for rank in range(3)}
    record = SimpleNamespace(members=members)
    settings = build({"model": "any"})
    return SimpleNamespace(
        run_dir=run_dir,
        identity=SimpleNamespace(newest_epoch=1),
        record=record,
        promised={},
        guests=SimpleNamespace(present=set[int]),
        histories={"train": History(run_dir, "train")},
        settings=SimpleNamespace(
            claims=False, rollout=settings.rollout, eval=settings.eval, engine=settings.engine
        ),
    )


@pytest.fixture
def iteration() -> Iteration:
    """An iteration that the master has opened."""
    return Iteration(1, documents={Phase.ITERATION_START: {"policy": POLICY, "opened": {}, "code": {}}})


def finish(node: Any, *groups: Group, kind: Kind = "train") -> None:
    writer = PartWriter(node.run_dir, kind, 1, 0, 2, ORIGIN)
    for each in groups:
        writer.add(each)
    writer.flush()


def test_every_slot_is_needed_where_there_are_no_spare_ones(node: Any, iteration: Iteration) -> None:
    finish(node, group(1), tombstone(2))
    assert rollout_steps.plan(node, iteration, "train", Quota(8, 8), ORIGIN, range(8)) == {
        "shares": {"0": [0, 3, 4], "1": [5, 6], "2": [7]},
        "needed": {"0": 3, "1": 2, "2": 1},
        "short": 0,
        "kept": {},
    }


def test_spare_slots_come_after_the_needed_ones_of_each_node(node: Any, iteration: Iteration) -> None:
    assert rollout_steps.plan(node, iteration, "train", Quota(4, 8), ORIGIN, range(8)) == {
        "shares": {"0": [0, 1, 4, 5], "1": [2, 6], "2": [3, 7]},
        "needed": {"0": 2, "1": 1, "2": 1},
        "short": 0,
        "kept": {},
    }


def test_after_a_restart_flat_groups_are_replaced_by_spare_slots(node: Any, iteration: Iteration) -> None:
    finish(node, group(0), group(1, rewards=(1.0, 1.0)), tombstone(3), group(4))
    plan = rollout_steps.plan(node, iteration, "train", Quota(4, 8, replace_flat=True), ORIGIN, range(8))
    assert sum(plan["needed"].values()) == 2
    assert sorted(slot for share in plan["shares"].values() for slot in share) == [2, 5, 6, 7]


def test_what_no_slot_is_left_for_is_short(node: Any, iteration: Iteration) -> None:
    finish(node, *(group(slot, rewards=(1.0, 1.0)) for slot in range(6)))
    plan = rollout_steps.plan(node, iteration, "train", Quota(4, 8, replace_flat=True), ORIGIN, range(8))
    assert (sum(plan["needed"].values()), plan["short"]) == (2, 2)
    said = {rank: {"short": 0} for rank in range(3)}
    assert rollout_steps.sum_short(plan, {**said, 1: {"short": 1}})["short"] == 3


def test_nothing_is_planned_once_enough_is_finished(node: Any, iteration: Iteration) -> None:
    finish(node, *(group(slot) for slot in range(4)))
    plan = rollout_steps.plan(node, iteration, "train", Quota(4, 8), ORIGIN, range(8))
    assert plan["shares"] == {"0": [], "1": [], "2": []} and not any(plan["needed"].values())


def test_what_is_in_flight_stays_where_it_is_and_makes_the_share_smaller(
    node: Any, iteration: Iteration
) -> None:
    key = key_of(node, iteration, "train")
    finish(node, group(0))
    node.promised = {0: {"key": key, "slots": [0, 3, 7]}, 1: {"key": "of others", "slots": [1]}, 2: {}}
    plan = rollout_steps.plan(node, iteration, "train", Quota(8, 8), ORIGIN, range(8))
    assert plan["kept"] == {"0": [3, 7]}
    assert plan["shares"] == {"0": [1], "1": [2, 4], "2": [5, 6]}


def test_of_two_nodes_that_have_a_slot_in_flight_one_keeps_it(node: Any, iteration: Iteration) -> None:
    key = key_of(node, iteration, "train")
    node.promised = {rank: {"key": key, "slots": [2, 3]} for rank in range(3)}
    plan = rollout_steps.plan(node, iteration, "train", Quota(2, 6), ORIGIN, range(6))
    assert plan["kept"] == {"0": [2, 3]}
    assert not any(plan["needed"].values())


def test_without_weights_every_slot_is_in_one_chunk_or_in_flight(node: Any, iteration: Iteration) -> None:
    node.settings.claims = True
    node.promised = {2: {"key": key_of(node, iteration, "train"), "slots": [5]}}
    finish(node, group(0))
    plan = rollout_steps.plan(node, iteration, "train", Quota(40, 40), ORIGIN, range(40))
    chunked = [slot for slots, _ in plan["chunks"] for slot in slots]
    assert sorted([*chunked, 5]) == list(range(1, 40)) and plan["spare"] == []
    assert set(plan["first"]) == {"0", "1", "2"} and plan["short"] == 0


def test_a_node_alone_claims_too_as_a_guest_may_come(node: Any, iteration: Iteration) -> None:
    node.settings.claims = True
    node.record.members = {0: SimpleNamespace(weight=1.0)}
    plan = rollout_steps.plan(node, iteration, "train", Quota(3, 3), ORIGIN, range(3))
    assert plan["chunks"] and plan["first"] == {"0": 0}
    node.guests.present = lambda: {1000}
    plan = rollout_steps.plan(node, iteration, "train", Quota(3, 3), ORIGIN, range(3))
    assert plan["first"].keys() == {"0", "1000"}, "a guest is there"


def test_what_the_nodes_have_made_is_joined() -> None:
    made = [{"7": 3.5}, 4]
    said = {0: {"short": 0, "made": made}, 1: {"short": 0}}
    assert rollout_steps.sum_short({"short": 0}, said)["made"] == {"0": made}
    said[0]["from_guests"] = {"parts": {"r1000": "sha"}, "timings": {"1000": made}}
    totals = rollout_steps.sum_short({"short": 0}, said)
    assert totals == {"short": 0, "made": {"0": made, "1000": made}, "named": {"r1000": "sha"}}


def test_evaluation_of_which_every_group_is_given_up_ends_only_a_run_that_does_nothing_else(
    node: Any, iteration: Iteration, caplog: pytest.LogCaptureFixture
) -> None:
    files.make_directory(node.run_dir.trajectories("eval", 1))
    manifest = node.run_dir.manifest("eval", 1)
    finish(node, tombstone(0), kind="eval")
    totals = {"short": 0, "made": {}, "named": {}}

    node.histories["eval"] = node.histories["train"]

    def aggregate(split: str | None) -> None:
        node.settings.rollout_split = split
        rollout_steps.aggregate(node, iteration, "eval", Quota(1, 1), ORIGIN, totals, {}, range(1))

    with pytest.raises(AllGivenUp, match="all 1 groups were given up"):
        aggregate("eval-only")
    assert not manifest.exists()
    aggregate(None)
    assert "this evaluation has no score, training goes on: all 1 groups were given up" in caplog.text
    assert manifest.exists()


@pytest.mark.parametrize("count", [1, 4])
def test_groups_given_up_by_all_nodes_together_end_the_run_as_those_of_one(
    node: Any, iteration: Iteration, count: int
) -> None:
    finish(node, *map(tombstone, range(count)))
    totals, directory = {"short": 0, "made": {}, "named": {}}, node.run_dir.trajectories("train", 1)
    with pytest.raises(AllGivenUp, match=rf"all {count} groups were given up, e.g. it took"):
        rollout_steps.aggregate(
            node, iteration, "train", Quota(count, count), ORIGIN, totals, {}, range(count)
        )
    assert not (directory / "manifest.json").exists()
    node.identity.newest_epoch = 2
    plan = rollout_steps.plan(node, iteration, "train", Quota(4, 4), ORIGIN, range(4))
    assert plan["needed"] == {"0": 2, "1": 1, "2": 1}, "the next start makes them again"
